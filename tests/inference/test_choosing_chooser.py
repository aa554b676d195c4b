"""Choosing tokens of many requests together: each gets what it would get alone."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from swift.core.errors import NumericsError
from swift.inference.choosing.chooser import Chooser, Run
from swift.inference.choosing.penalties import Counts, penalise
from swift.inference.requests import Request, SamplingParams

VOCAB = 1000
ENDS = frozenset({2, 9})
SETTINGS = [
    SamplingParams(),
    SamplingParams(logprobs=0),
    SamplingParams(temperature=1.0, seed="a", logprobs=3),
    SamplingParams(temperature=1.0, seed="b"),
    SamplingParams(temperature=0.7, top_p=0.9, seed="c", logprobs=20),
    SamplingParams(temperature=0.7, top_k=40, seed="d"),
    SamplingParams(temperature=1.5, top_k=300, top_p=0.8, min_p=0.01, seed="e"),
    SamplingParams(temperature=1.0, min_p=0.1, seed="f"),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, logprobs=1),
    SamplingParams(temperature=1.0, repetition_penalty=0.8, frequency_penalty=-0.5, seed="g"),
    SamplingParams(logit_bias=((5, 7.0), (6, -100.0), (5, 1.0))),
    SamplingParams(min_new_tokens=6),
    SamplingParams(temperature=1.0, min_new_tokens=9, seed="h", logit_bias=((2, 20.0),)),
]


def scores_after(tokens: list[int], spread: float = 3.0) -> torch.Tensor:
    """A model of sorts: scores that only the last tokens decide; ends and repetitions are likely. [vocab]"""
    digest = hashlib.sha256(repr(tokens[-3:]).encode()).digest()
    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))) * spread
    scores[tokens[-1]] += 4.0
    scores[2] += 6.0
    return scores


def answers(params: list[SamplingParams], num: int = 25, drafts: int = 0) -> list[list]:
    """All choices of each request, computed together. Drafts are right two times out of three."""
    chooser = Chooser(VOCAB, "cpu")
    prompts = [[11 + k, 30, 7, 30] for k in range(len(params))]
    states = [chooser.begin(Request(str(k), prompts[k], each), ENDS) for k, each in enumerate(params)]
    found: list[list] = [[] for _ in params]
    luck = random.Random(0)
    while active := [k for k, each in enumerate(found) if len(each) < num and not (each and each[-1].token in ENDS)]:
        runs, rows = [], []
        for k in active:
            text, guesses = [*prompts[k], *states[k].tokens_so_far], []
            rows.append(scores_after(text))
            for _ in range(luck.randrange(drafts + 1)):
                likeliest = scores_after([*text, *guesses]).argmax().item()
                guesses.append(likeliest if luck.random() < 0.7 else luck.randrange(VOCAB))
                rows.append(scores_after([*text, *guesses]))
            runs.append(Run(states[k], tuple(guesses)))
        for k, run, chosen in zip(active, runs, chooser.choose(torch.stack(rows), runs), strict=True):
            assert 1 <= len(chosen) <= len(run.drafts) + 1
            assert tuple(choice.token for choice in chosen[:-1]) == run.drafts[: len(chosen) - 1]
            found[k].extend(chosen)
            assert states[k].tokens_so_far == [choice.token for choice in found[k]]
    return [each[:num] for each in found]


@pytest.fixture(scope="module")
def alone():
    """Each request's answer, computed by itself (its prompt is the one of its place)."""
    return [_by_itself(place, params) for place, params in enumerate(SETTINGS)]


def _by_itself(place: int, params: SamplingParams) -> list:
    chooser = Chooser(VOCAB, "cpu")
    prompt = [11 + place, 30, 7, 30]
    state, found = chooser.begin(Request("r", prompt, params), ENDS), []
    while len(found) < 25 and not (found and found[-1].token in ENDS):
        (chosen,) = chooser.choose(scores_after([*prompt, *state.tokens_so_far])[None], [Run(state)])
        found.extend(chosen)
    return found


def test_a_request_gets_the_same_beside_others(alone):
    """Tokens and log-probabilities, bit for bit."""
    assert answers(SETTINGS) == alone
    lengths = {len(each) for each in alone}
    assert len(lengths) > 3  # some end, some don't


@pytest.mark.parametrize("drafts", [1, 4])
def test_guesses_change_nothing(alone, drafts):
    assert answers(SETTINGS, drafts=drafts) == alone


def test_right_guesses_are_accepted():
    chooser = Chooser(VOCAB, "cpu")
    state = chooser.begin(Request("r", [1], SamplingParams()), ENDS)
    scores = torch.zeros(4, VOCAB)
    for row, token in enumerate((5, 6, 7, 8)):
        scores[row, token] = 1.0
    (chosen,) = chooser.choose(scores, [Run(state, (5, 6, 0))])
    assert [choice.token for choice in chosen] == [5, 6, 7]


def test_nothing_is_chosen_after_an_end():
    chooser = Chooser(VOCAB, "cpu")
    scores = torch.zeros(3, VOCAB)
    scores[:, 2] = 1.0
    state = chooser.begin(Request("r", [1], SamplingParams()), ENDS)
    assert [choice.token for choice in chooser.choose(scores, [Run(state, (2, 2))])[0]] == [2]
    going = chooser.begin(Request("r", [1], SamplingParams(ignore_eos=True)), frozenset())
    assert [choice.token for choice in chooser.choose(scores, [Run(going, (2, 2))])[0]] == [2, 2, 2]


@pytest.mark.parametrize("threads", [1, 2])
def test_logprobs_of_a_row_are_its_own(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        chooser = Chooser(49152, "cpu")
        scores = torch.randn(33, 49152, generator=torch.Generator().manual_seed(0)) * 4
        targets = [7 * row for row in range(33)]
        together = chooser.prompt_logprobs(scores, targets, 5)
        for row in range(33):
            assert chooser.prompt_logprobs(scores[row : row + 1].clone(), targets[row : row + 1], 5) == [together[row]]
    finally:
        torch.set_num_threads(before)
    exact = scores.double().log_softmax(dim=-1)
    for row, found in enumerate(together):
        assert found.token == targets[row]
        assert found.logprob == pytest.approx(exact[row, targets[row]].item(), abs=1e-5)
        values, tokens = exact[row].topk(5)
        assert [token for token, _ in found.top] == tokens.tolist()
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_are_of_the_scores_as_they_are():
    """Before penalties, bias, filters and temperature."""
    params = SamplingParams(temperature=0.3, top_k=1, logit_bias=((5, 50.0),), repetition_penalty=2.0, logprobs=2)
    chooser = Chooser(VOCAB, "cpu")
    scores = scores_after([3, 4])[None]
    kept = scores.clone()
    ((choice,),) = chooser.choose(scores, [Run(chooser.begin(Request("r", [3, 4], params), ENDS))])
    assert choice.token == 5
    exact = scores[0].double().log_softmax(dim=-1)
    assert choice.logprob.logprob == pytest.approx(exact[5].item(), abs=1e-5)
    assert [token for token, _ in choice.logprob.top] == exact.topk(2).indices.tolist()
    assert torch.equal(scores, kept)


@pytest.mark.parametrize("params", [SETTINGS[0], SETTINGS[3], SETTINGS[8]], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_scores_end_their_own_request(params, value):
    chooser = Chooser(VOCAB, "cpu")
    scores = torch.stack([scores_after([k]) for k in range(3)])
    scores[1, 500] = value
    states = [chooser.begin(Request("r", [1], params), ENDS) for _ in range(3)]
    first, broken, third = chooser.choose(scores, [Run(state) for state in states])
    assert isinstance(broken, NumericsError) and "NaN" in broken.message
    assert len(first) == len(third) == 1
    with pytest.raises(NumericsError):
        chooser.prompt_logprobs(scores, [1, 2, 3], 0)


def test_scores_are_broken_even_where_they_cannot_be_chosen():
    chooser = Chooser(VOCAB, "cpu")
    scores = scores_after([1])[None]
    scores[0, 2] = torch.nan
    (found,) = chooser.choose(scores, [Run(chooser.begin(Request("r", [1], SETTINGS[12]), ENDS))])
    assert isinstance(found, NumericsError)


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (SamplingParams(frequency_penalty=2.0), [0, 1, 2, 3, 4, 5, 6, 7]),
        (SamplingParams(presence_penalty=2.0), [0, 1, 2, 3, 4, 5, 6, 7]),
        (SamplingParams(repetition_penalty=2.0), [0, 2, 4, 5, 6, 7, 8, 9]),  # 1 and 3 are in the prompt
        (SamplingParams(), [0] * 8),
    ],
)
def test_penalties_know_the_answer_so_far(params, wanted):
    chooser = Chooser(VOCAB, "cpu")
    state = chooser.begin(Request("r", [1, 3], params), frozenset())
    scores = 10 - 0.01 * torch.arange(VOCAB)[None]
    for _ in range(8):
        chooser.choose(scores, [Run(state)])
    assert state.tokens_so_far == wanted


def test_nothing_left_to_choose_is_an_error():
    params = SamplingParams(temperature=1.0, min_new_tokens=3)
    chooser = Chooser(4, "cpu")
    (found,) = chooser.choose(torch.zeros(1, 4), [Run(chooser.begin(Request("r", [1], params), frozenset(range(4))))])
    assert isinstance(found, NumericsError)


def test_ends_are_impossible_before_the_wanted_length():
    for params in (SamplingParams(min_new_tokens=5), SamplingParams(min_new_tokens=5, temperature=1.0)):
        chooser = Chooser(VOCAB, "cpu")
        state = chooser.begin(Request("r", [1], params), ENDS)
        scores = torch.zeros(1, VOCAB)
        scores[0, 2] = 60.0
        for _ in range(6):
            chooser.choose(scores, [Run(state)])
        assert [token in ENDS for token in state.tokens_so_far] == [False] * 5 + [True]


def test_penalties_against_their_definition():
    """Float64, one token at a time."""
    scores = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)) * 5
    prompts = [[1, 2, 3, 2, *range(200, 300)], [4, *range(50)], [5, 6, 5]]
    replies = [[2, 2, 9, 10], [], [5, 7, 7, 7, *range(100, 140)]]
    params = [
        SamplingParams(repetition_penalty=1.7, presence_penalty=0.3, frequency_penalty=0.2),
        SamplingParams(repetition_penalty=0.6),
        SamplingParams(presence_penalty=-1.0, frequency_penalty=2.0),
    ]
    wanted = scores.double().numpy().copy()
    for row in range(3):
        for token in set(prompts[row] + replies[row]):
            value = wanted[row, token]
            value = value * params[row].repetition_penalty if value < 0 else value / params[row].repetition_penalty
            count = replies[row].count(token)
            value -= params[row].frequency_penalty * count + params[row].presence_penalty * (count > 0)
            wanted[row, token] = value
    counts = [Counts(prompt) for prompt in prompts]
    for each, reply in zip(counts, replies):
        for token in reply:
            each.add(token)
    found = scores.clone()
    penalise(found, [0, 1, 2], counts, params)
    np.testing.assert_allclose(found.double().numpy(), wanted, atol=1e-5)
    assert not torch.equal(found[1], scores[1])


def test_the_repetition_penalty_is_that_of_transformers():
    scores = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)) * 5
    text = [3, 3, 8, 500, 999]
    wanted = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([text]), scores.clone())
    found = scores.clone()
    penalise(found, [0], [Counts(text)], [SamplingParams(repetition_penalty=1.3)])
    assert torch.equal(found, wanted)


def test_equal_seeds_give_equal_answers():
    chooser = Chooser(VOCAB, "cpu")
    scores = torch.zeros(1, VOCAB)
    drawn = []
    for seed in ("x", "x", "y"):
        state = chooser.begin(Request("r", [1], SamplingParams(temperature=1.0, seed=seed)), frozenset())
        for _ in range(20):
            chooser.choose(scores, [Run(state)])
        drawn.append(state.tokens_so_far)
    assert drawn[0] == drawn[1] != drawn[2]
    draws = random.Random("x")
    assert drawn[0] == [int(draws.random() * VOCAB) for _ in range(20)]


def test_scores_of_another_count_of_rows_are_a_mistake():
    chooser = Chooser(VOCAB, "cpu")
    state = chooser.begin(Request("r", [1], SamplingParams()), ENDS)
    with pytest.raises(ValueError, match="2 rows"):
        chooser.choose(torch.zeros(2, VOCAB), [Run(state)])
