"""Beam search without a model, held against `generate(num_beams=...)` of transformers."""

from __future__ import annotations

import pytest
import torch
from fixtures import build_tiny_model
from transformers import AutoModelForCausalLM

from swift.inference.choosing.beams import BeamGroup
from swift.inference.choosing.chooser import Chooser
from swift.inference.requests import Request, SamplingParams

NEW_TOKENS = 11
PROMPTS = ([5, 9, 300, 41], [7], [17, 4, 4, 90, 12, 33, 33, 2])


@pytest.fixture(scope="module", params=[0, 1])
def model(request, tmp_path_factory):
    """A tiny random model whose answers differ from prompt to prompt: its scores are spread out."""
    folder = build_tiny_model(tmp_path_factory.mktemp("beams"), seed=request.param, initializer_range=0.3)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def search(model, prompt: list[int], group: BeamGroup, width: int) -> list[int]:
    """A plain loop around a `BeamGroup`: every step computes whole texts."""
    while not group.finished:
        logits = model(torch.tensor([[*prompt, *beam] for beam in group.beams])).logits[:, -1].float()
        group.advance(logits.log_softmax(dim=-1))
    return group.best()[0]


def likely_ends(model, prompt: list[int], count: int) -> frozenset[int]:
    """Tokens that beams come across: likely ones at different places of the greedy answer."""
    with torch.inference_mode():
        greedy = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        logits = model(greedy).logits[0]
    return frozenset([greedy[0, -3].item(), *(logits[-1 - 2 * k].topk(2).indices[1].item() for k in range(1, count))])


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [
        *[(width, length_penalty, False) for width in (2, 4) for length_penalty in (0.5, 1.0, 2.0)],
        (4, -1.0, False),
        (2, 1.0, True),
        (4, 0.5, True),
    ],
)
def test_beam_search_finds_what_transformers_finds(model, width, length_penalty, early_stopping):
    ended = 0
    for prompt in PROMPTS:
        for num_ends in (1, 3):
            ends = likely_ends(model, prompt, num_ends)
            group = BeamGroup(width, length_penalty, ends, NEW_TOKENS, early_stopping=early_stopping)
            found = search(model, prompt, group, width)
            wanted = model.generate(
                torch.tensor([prompt]),
                num_beams=width,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                eos_token_id=sorted(ends),
                pad_token_id=0,
                use_cache=False,
                return_dict_in_generate=True,
                output_scores=True,
            )
            assert found == wanted.sequences[0, len(prompt) :].tolist()
            assert group.best()[1] == pytest.approx(float(wanted.sequences_scores[0]), rel=1e-6)
            ended += found[-1] in ends
    assert ended or length_penalty >= 1  # ends matter in this test


@pytest.mark.parametrize("width", [2, 4])
def test_penalties_and_forbidden_ends_are_those_of_transformers(model, width):
    chooser = Chooser(model.config.vocab_size, "cpu")
    params = SamplingParams(repetition_penalty=1.4, min_new_tokens=6, logit_bias=((700, 6.0), (41, -2.0)))
    for prompt in PROMPTS:
        ends = likely_ends(model, prompt, 3)
        request, group = Request("r", prompt, params), BeamGroup(width, 1.0, ends, NEW_TOKENS)
        while not group.finished:
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *beam] for beam in group.beams])).logits[:, -1]
            group.advance(chooser.beam_logprobs(logits, request, ends, group.beams))
        wanted = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            repetition_penalty=1.4,
            min_new_tokens=6,
            sequence_bias={(700,): 6.0, (41,): -2.0},
            eos_token_id=sorted(ends),
            pad_token_id=0,
            use_cache=False,
        )
        assert group.best()[0] == wanted[0, len(prompt) :].tolist()


def test_a_search_without_ends_runs_to_the_last_token(model):
    group = BeamGroup(3, 1.0, frozenset(), 6)
    assert len(search(model, PROMPTS[0], group, 3)) == 6


def test_one_beam_is_greedy(model):
    group = BeamGroup(1, 1.0, frozenset({3}), 8)
    greedy = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=8, do_sample=False, eos_token_id=3)
    assert search(model, PROMPTS[0], group, 1) == greedy[0, len(PROMPTS[0]) :].tolist()


def test_forbidden_tokens_are_no_candidates():
    """Rows of which most tokens are impossible, as under a structure."""
    rows = torch.full((3, 8), -torch.inf)
    rows[:, 2] = 0.0
    group = BeamGroup(3, 1.0, frozenset({7}), 3)
    while not group.finished:
        group.advance(rows)
    assert group.best() == ([2, 2, 2], 0.0)


def test_many_likely_ends_leave_enough_beams_that_go_on():
    ends = frozenset({0, 1, 2, 3})
    rows = (-torch.arange(20.0)).expand(2, -1).log_softmax(dim=-1)  # the ends are the likeliest
    group = BeamGroup(2, 1.0, ends, 5)
    assert group.advance(rows) == [(0, 4), (0, 5)]
