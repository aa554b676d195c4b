"""The engine answers as plain `generate` does, whatever a prompt is batched with; stops, seeds and limits hold."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from fixtures import build_tiny_model

from swift.config import InferConfig, build_config
from swift.config.inference import GenerationConfig
from swift.core.errors import DataError, NumericsError, SwiftError, UsageError
from swift.inference.loading import prepare
from swift.inference.sampling import RowSampler, resolve_sampling


def plain_generate(model, engine, prompt, **settings):
    """The same answer from transformers directly, one prompt, no padding."""
    settings = {"do_sample": False, "eos_token_id": engine.stop_token_ids, **settings}
    output = model.generate(torch.tensor([prompt]), **settings)
    return output[0, len(prompt) :].tolist()


def ended_by(engine, prompt, config):
    """A token of the greedy answer, late enough to be worth cutting at, and where it comes first."""
    tokens = engine.generate([prompt], config)[0].tokens
    place = next(i for i in range(5, len(tokens)) if tokens[i] not in tokens[:i])
    return tokens, place


def test_greedy_equals_plain_generate_token_for_token(tiny_model, tiny_engine, questions):
    for completion, prompt in zip(
        tiny_engine.generate(questions, GenerationConfig(max_new_tokens=24)), questions, strict=True
    ):
        assert completion.tokens == plain_generate(tiny_model, tiny_engine, prompt, max_new_tokens=24)
        assert completion.num_prompt_tokens == len(prompt)
        assert completion.text == tiny_engine.decode(completion.tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3},
        {"num_beams": 3},
        {"temperature": 0.9},
        {"temperature": 1.2, "top_k": 20},
        {"temperature": 1.5, "top_p": 0.8, "repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_an_answer_does_not_depend_on_its_batch(tiny_engine, questions, settings):
    config = GenerationConfig(max_new_tokens=16, **settings)
    together = tiny_engine.generate(questions, config, seeds=[7, 8, 9, 10, 11])
    for k, prompt in enumerate(questions):
        assert together[k] == tiny_engine.generate([prompt], config, seeds=[7 + k])[0]


def test_beam_search_equals_plain_generate(tiny_model, tiny_engine, questions):
    config = GenerationConfig(max_new_tokens=12, num_beams=4)
    for prompt in questions[:2]:
        mine = tiny_engine.generate([prompt], config)[0].tokens
        assert mine == plain_generate(tiny_model, tiny_engine, prompt, max_new_tokens=12, num_beams=4)[: len(mine)]


def test_same_seed_same_answer_and_other_seed_another(tiny_engine, questions):
    config = GenerationConfig(max_new_tokens=16, temperature=1.0, seed=5)
    first, again = (tiny_engine.generate(questions, config) for _ in range(2))
    assert first == again
    other = tiny_engine.generate(questions, GenerationConfig(max_new_tokens=16, temperature=1.0, seed=6))
    assert all(a.tokens != b.tokens for a, b in zip(first, other, strict=True))
    twice = tiny_engine.generate([questions[0]] * 2, config)
    assert twice[0].tokens != twice[1].tokens, "the same prompt twice is two draws"


def test_an_end_token_stops_and_is_the_last_token(tiny_engine, tiny_model, questions, engine_on):
    tokens, place = ended_by(tiny_engine, questions[1], GenerationConfig(max_new_tokens=24))
    engine = engine_on(tiny_model, tiny_engine, stop_token_ids=[*tiny_engine.stop_token_ids, tokens[place]])
    completion = engine.generate(questions, GenerationConfig(max_new_tokens=24))[1]
    assert completion.tokens == tokens[: place + 1]
    assert completion.finish_reason == "stop"
    assert completion.text == engine.decode(tokens[:place]), "the end token is not part of the text"


def test_stop_tokens_are_the_template_s_and_the_model_s(tiny_model_dir, tmp_path):
    for name, own in (("none", None), ("one", 7), ("two", [7, 8])):
        folder = shutil.copytree(tiny_model_dir, tmp_path / name)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": own}))
        prepared = prepare(build_config(InferConfig, {"model": str(folder), "device": "cpu"}))
        ids = prepared.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
        assert prepared.stop_token_ids() == [*ids, *{"none": [], "one": [7], "two": [7, 8]}[name]]


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_stop_word_ends_the_answer_and_is_cut(tiny_engine, questions, num_beams):
    config = GenerationConfig(max_new_tokens=32, num_beams=num_beams)
    full = tiny_engine.generate([questions[1]], config)[0]
    word = full.text[8:12]
    config.stop_words = ["never in there", word]
    batch = tiny_engine.generate(questions, config)
    assert batch[1].text == full.text[: full.text.index(word)]
    assert batch[1].finish_reason == "stop"
    assert batch[1].tokens == full.tokens[: len(batch[1].tokens)]
    assert word in tiny_engine.decode(batch[1].tokens)
    assert word not in tiny_engine.decode(batch[1].tokens[:-1])
    assert batch[1] == tiny_engine.generate([questions[1]], config)[0]
    assert word not in "".join(b.text for b in batch)


def test_a_special_token_as_stop_word(tiny_engine, questions):
    word = next(t for t in tiny_engine.tokenizer.all_special_tokens if t != "<|im_end|>")
    sampling = tiny_engine.sampling(GenerationConfig(stop_words=[word]))
    assert tiny_engine.tokenizer.convert_tokens_to_ids(word) in tiny_engine.end_tokens(sampling)


def test_stream_gives_the_same_answer_in_pieces(tiny_engine, questions):
    for settings in ({}, {"temperature": 1.0}, {"stop_words": ["e", "th"]}):
        config = GenerationConfig(max_new_tokens=30, **settings)
        for prompt in questions:
            stream = tiny_engine.stream(prompt, config, seed=3)
            pieces = list(stream)
            alone = tiny_engine.generate([prompt], config, seeds=[3])[0]
            assert "".join(pieces) == alone.text
            assert stream.completion == alone


def test_closing_a_stream_ends_the_generation(tiny_engine, questions):
    stream = tiny_engine.stream(questions[0], GenerationConfig(max_new_tokens=900))
    shown = next(stream)
    stream.close()
    assert stream.completion is not None
    assert stream.completion.finish_reason == "cancelled"
    assert len(stream.completion.tokens) < 400
    assert stream.completion.text.startswith(shown)


def test_a_failure_in_the_stream_reaches_the_reader(tiny_model_dir, questions, tiny_engine, engine_on):
    engine = engine_on(broken_model(tiny_model_dir), tiny_engine)
    with pytest.raises(NumericsError):
        list(engine.stream(questions[0], GenerationConfig(max_new_tokens=4)))


def broken_model(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    return model


def test_nan_scores_stop_instead_of_answering_nonsense(tiny_model_dir, questions, tiny_engine, engine_on):
    engine = engine_on(broken_model(tiny_model_dir), tiny_engine)
    with pytest.raises(NumericsError, match="NaN"):
        engine.generate(questions, GenerationConfig(max_new_tokens=4))


def test_logprobs_are_those_of_a_forward_pass(tiny_engine, tiny_model, questions):
    for settings in ({}, {"temperature": 1.3, "top_k": 50}):
        batch = tiny_engine.generate(questions, GenerationConfig(max_new_tokens=10, **settings), logprobs=True)
        for prompt, answer in zip(questions, batch, strict=True):
            with torch.no_grad():
                logits = tiny_model(torch.tensor([prompt + answer.tokens])).logits[0].double()
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            expected = logprobs.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
            assert answer.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
    assert tiny_engine.generate(questions[:1], GenerationConfig(max_new_tokens=2))[0].logprobs is None


def test_sampling_follows_the_distribution(tiny_engine, tiny_model, questions, engine_on):
    """3000 draws of one token against temperature, top_k and top_p computed here in float64."""
    prompt = questions[0]
    with torch.no_grad():
        logits = tiny_model(torch.tensor([prompt])).logits[0, -1].double() / 0.04
    top, ids = logits.topk(10)
    probs = top.softmax(-1)
    kept = probs.cumsum(-1) - probs < 0.9
    probs = probs * kept / (probs * kept).sum()
    config = GenerationConfig(max_new_tokens=1, temperature=0.04, top_k=10, top_p=0.9)
    engine = engine_on(tiny_model, tiny_engine, max_batch_size=1000)
    engine.max_in_flight = 1000
    draws = [answer.tokens[0] for answer in engine.generate([prompt] * 3000, config)]
    assert set(draws) <= set(ids[kept].tolist())
    for token, probability in zip(ids.tolist(), probs.tolist(), strict=True):
        spread = 4.5 * math.sqrt(probability * (1 - probability) / 3000) + 1e-9
        assert draws.count(token) / 3000 == pytest.approx(probability, abs=spread)


@pytest.mark.parametrize("flatness", [0.05, 0.5, 1e-4])
def test_top_p_keeps_the_same_tokens_whether_or_not_it_sorts_everything(flatness):
    """Sharp rows are decided among the likeliest candidates, flat ones need the whole vocabulary."""
    scores = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0)) / flatness
    sampling = resolve_sampling(GenerationConfig(temperature=1.0, top_p=0.7), None)
    probs, ids = scores.double().softmax(-1).sort(-1, descending=True)
    kept = probs.cumsum(-1) - probs < 0.7
    for row in range(6):
        allowed = set(ids[row][kept[row]].tolist())
        sampler = RowSampler(sampling, list(range(200)))
        drawn = sampler(None, scores[row].repeat(200, 1)).argmax(-1).tolist()
        assert set(drawn) <= allowed
        mixed = RowSampler(sampling, [0, 1])(None, torch.stack([scores[row], torch.zeros(5000)])).argmax(-1)
        assert mixed[0] == drawn[0], "a flat row beside it changes nothing"


def test_prompts_that_cannot_be_answered_are_refused_with_the_numbers(tiny_engine, questions):
    too_long = [5] * 1024
    for prompt, words in ((too_long, ["1024", "context"]), ([], ["empty"]), ([10**6], ["1000000"])):
        with pytest.raises(DataError) as caught:
            tiny_engine.generate([questions[0], prompt], GenerationConfig(max_new_tokens=2))
        assert all(word in str(caught.value) for word in words)
        with pytest.raises(DataError):
            tiny_engine.stream(prompt, GenerationConfig())
    answers = dict(tiny_engine.generate_each([too_long, questions[0]], GenerationConfig(max_new_tokens=2)))
    assert isinstance(answers[0], DataError)
    assert answers[1] == tiny_engine.generate([questions[0]], GenerationConfig(max_new_tokens=2))[0]


def test_the_context_bounds_the_answer(tiny_engine, engine_on):
    """A model with learned positions fails hard if a row runs past the last one, also beside rows with room left."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tiny_engine.tokenizer), n_positions=40, n_embd=32, n_layer=1, n_head=2)
    config.bos_token_id = config.eos_token_id = None
    engine = engine_on(GPT2LMHeadModel(config), tiny_engine)
    prompts = [[5] * 36, [6] * 10, [7] * 39]
    answers = engine.generate(prompts, GenerationConfig(max_new_tokens=20))
    assert [len(a.tokens) for a in answers] == [4, 20, 1]
    assert [a.finish_reason for a in answers] == ["length"] * 3
    assert answers == [engine.generate([p], GenerationConfig(max_new_tokens=20))[0] for p in prompts]


@pytest.mark.parametrize(
    "own", [{"max_new_tokens": 3}, {"max_length": 10}, {"max_new_tokens": 3, "max_length": 10}, {}]
)
def test_lengths_in_the_model_s_own_settings_do_not_matter(
    tiny_model_dir, tiny_engine, questions, caplog, engine_on, own
):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    engine = engine_on(model, tiny_engine)
    config = GenerationConfig(max_new_tokens=7)
    assert engine.generate(questions, config) == tiny_engine.generate(questions, config)
    assert not caplog.records


def test_default_number_of_tokens(tiny_engine):
    assert tiny_engine.sampling(GenerationConfig()).max_new_tokens == 512


def test_defaults_come_from_the_model_and_the_user_wins(tiny_engine):
    from transformers import GenerationConfig as ModelSettings

    model = ModelSettings(do_sample=True, temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05)
    plain = resolve_sampling(GenerationConfig(), model)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.repetition_penalty) == (0.6, 0.95, 20, 1.05)
    mine = resolve_sampling(GenerationConfig(temperature=0, top_k=0, repetition_penalty=1.0), model)
    assert (mine.temperature, mine.top_k, mine.repetition_penalty) == (0, 0, 1)
    greedy = ModelSettings(do_sample=False, temperature=0.6, top_p=0.5)
    assert resolve_sampling(GenerationConfig(), greedy).temperature == 0
    sampled = resolve_sampling(GenerationConfig(top_p=0.3), greedy)
    assert (sampled.temperature, sampled.top_p) == (1, 0.3)
    assert resolve_sampling(GenerationConfig(num_beams=2), model).temperature == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 0},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.5},
        {"repetition_penalty": 0},
        {"num_beams": 0},
        {"num_beams": 2, "temperature": 0.5},
        {"num_beams": 2, "top_p": 0.5},
    ],
    ids=str,
)
def test_impossible_settings_are_refused_by_name(tiny_engine, questions, settings):
    with pytest.raises(UsageError) as caught:
        tiny_engine.generate(questions, GenerationConfig(**settings))
    assert f"--{next(iter(settings))}" in str(caught.value)


def test_beams_cannot_stream(tiny_engine, questions):
    with pytest.raises(UsageError, match="num_beams"):
        tiny_engine.stream(questions[0], GenerationConfig(num_beams=2))
    with pytest.raises(UsageError, match="beam"):
        tiny_engine.generate(questions, GenerationConfig(num_beams=2), logprobs=True)


def test_many_prompts_go_through_in_batches(tiny_engine, tiny_model, questions, engine_on):
    engine = engine_on(tiny_model, tiny_engine, max_batch_size=2)
    prompts = [questions[i % 5] for i in range(11)]
    config = GenerationConfig(max_new_tokens=6)
    assert engine.generate(prompts, config) == [tiny_engine.generate([p], config)[0] for p in prompts]


def test_out_of_memory_halves_the_batch_and_loses_nothing(tiny_engine, tiny_model, questions, engine_on, monkeypatch):
    engine = engine_on(tiny_model, tiny_engine, max_batch_size=4)
    generate, sizes = tiny_model.generate, []

    def small_device(**inputs):
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 1 or inputs["input_ids"].shape[1] > 80:
            raise torch.OutOfMemoryError("device full")
        return generate(**inputs)

    config = GenerationConfig(max_new_tokens=4)
    expected = [tiny_engine.generate([p], config)[0] for p in questions]
    monkeypatch.setattr(tiny_model, "generate", small_device)
    answers = dict(engine.generate_each(questions, config))
    assert sizes[:3] == [4, 2, 1]
    assert engine.backend.max_batch_size == 1
    long = max(range(5), key=lambda i: len(questions[i]))
    assert isinstance(answers[long], SwiftError) and "out of memory" in str(answers[long])
    assert [answers[i] for i in range(5) if i != long] == [expected[i] for i in range(5) if i != long]


def test_the_model_is_left_as_it_was(tmp_path, tiny_engine, questions, engine_on):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(build_tiny_model(tmp_path / "m"), attn_implementation="sdpa")
    model.train()
    settings = model.generation_config.to_dict()
    engine = engine_on(model, tiny_engine)
    engine.generate(questions, GenerationConfig(max_new_tokens=2))
    engine.close()
    assert model.training
    assert model.generation_config.to_dict() == settings
