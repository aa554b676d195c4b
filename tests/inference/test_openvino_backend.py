"""openvino-genai behind our interface: a tiny model converted here, asked for what Hugging Face answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from engines import ask, generated, submit
from openvino_model import convert
from transformers import AutoModelForCausalLM

from swift import cli
from swift.config import InferConfig, build_config
from swift.core.errors import DependencyError, ModelError, SwiftError, UsageError
from swift.inference.backends.choose import make_backend
from swift.inference.loading import prepare
from swift.inference.requests import Request, SamplingParams, Structure

GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7], list(range(3, 60)), [9, 9], list(range(3, 40))]


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("openvino_genai")
    return convert(tiny_model_dir, tmp_path_factory.mktemp("openvino") / "model")


def make(folder: Path, **settings):
    values = {"model": str(folder), "infer_backend": "openvino", "device": "cpu", "kv_cache_gib": 0.01, **settings}
    return make_backend(prepare(build_config(InferConfig, values)))


@pytest.fixture(scope="module")
def backend(folder):
    found = make(folder, max_batch_tokens=32)
    found.start()
    yield found
    found.close()


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()


def test_greedy_answers_are_those_of_hugging_face_alone_and_together(backend, model):
    wanted = [generated(model, prompt, 12, eos_token_id=None) for prompt in PROMPTS]
    requests = [Request(f"r{k}", prompt, GREEDY) for k, prompt in enumerate(PROMPTS)]
    together = ask(backend, *requests)
    assert [answer.tokens for answer in together] == wanted
    assert [ask(backend, request)[0].tokens for request in requests] == wanted
    assert {answer.last.finish_reason for answer in together} == {"length"}


def test_text_and_ends(backend, model, tokenizer):
    tokens = generated(model, PROMPTS[1], 12, eos_token_id=None)
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    (answer,) = ask(backend, Request("r", PROMPTS[1], GREEDY))
    assert answer.text == text
    (own,) = ask(backend, Request("r", PROMPTS[1], replace(GREEDY, stop_token_ids=(tokens[4],))))
    first = tokens.index(tokens[4])
    assert own.tokens == tokens[: first + 1]
    assert (own.last.finish_reason, own.last.stop_reason) == ("stop", tokens[4])
    word = text[len(text) // 2 : len(text) // 2 + 2]
    (stopped,) = ask(backend, Request("r", PROMPTS[1], replace(GREEDY, stop=(word,))))
    assert stopped.text == text[: text.index(word)] and stopped.last.stop_reason == word
    assert backend.stats().num_running == 0


def test_penalties_and_least_lengths_are_those_of_hugging_face(backend, model):
    wanted = generated(model, PROMPTS[3], 12, eos_token_id=None, repetition_penalty=1.7)
    (answer,) = ask(backend, Request("r", PROMPTS[3], replace(GREEDY, repetition_penalty=1.7)))
    assert answer.tokens == wanted


def test_draws_keep_to_their_filters(backend):
    params = replace(GREEDY, temperature=1.5, top_k=1, seed="x")
    (narrow,) = ask(backend, Request("r", PROMPTS[0], params))
    assert narrow.tokens == ask(backend, Request("g", PROMPTS[0], GREEDY))[0].tokens
    wide = [Request(f"w{k}", PROMPTS[0], replace(GREEDY, temperature=5.0, seed=str(k))) for k in range(6)]
    together = [answer.tokens for answer in ask(backend, *wide)]
    assert len({tuple(tokens) for tokens in together}) == 6
    assert [ask(backend, request)[0].tokens for request in wide] == together


def test_who_leaves_and_who_is_there_at_the_end(folder):
    found = make(folder)
    found.start()
    long = replace(GREEDY, max_new_tokens=400)
    leaving, staying = submit(found, Request("l", PROMPTS[0], long), Request("s", PROMPTS[2], long))
    found.cancel("l")
    assert leaving.wait().last.finish_reason == "cancelled"
    (twice,) = submit(found, Request("s", PROMPTS[0], GREEDY))
    assert "already" in str(twice.wait().last.error) or staying.wait().last.finish_reason == "length"
    found.close()
    assert staying.wait().last.finish_reason in ("cancelled", "length")
    with pytest.raises(SwiftError, match="closed"):
        found.submit(Request("late", [5], GREEDY), print)


def test_sleep_gives_the_model_back(folder, model):
    found = make(folder)
    found.start()
    found.sleep()
    assert found.stats().asleep
    with pytest.raises(UsageError, match="sleeps"):
        found.submit(Request("r", [5], GREEDY), print)
    found.wake()
    assert ask(found, Request("r", PROMPTS[0], GREEDY))[0].tokens == generated(model, PROMPTS[0], 12, eos_token_id=None)
    with pytest.raises(UsageError, match="level 2"):
        found.sleep(2)
    found.close()


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (replace(GREEDY, logprobs=1), "logprobs"),
        (replace(GREEDY, logit_bias=((5, 1.0),)), "logit_bias"),
        (replace(GREEDY, structure=Structure("json")), "structure"),
        (replace(GREEDY, num_beams=2), "beam"),
    ],
)
def test_what_it_cant_do_is_refused(params, said, backend):
    with pytest.raises(UsageError, match=said):
        backend.submit(Request("r", [5], params), print)
    with pytest.raises(UsageError, match="adapters"):
        backend.submit(Request("r", [5], GREEDY, adapter="a"), print)
    with pytest.raises(UsageError, match="weights"):
        backend.update_weights([])


@pytest.mark.parametrize(
    "settings",
    [{"speculative": "prompt_lookup"}, {"engine_python": "/x"}, {"attn_impl": "eager"}, {"engine_args": ["nothing"]}],
)
def test_settings_that_mean_nothing_are_refused(settings, folder):
    with pytest.raises(UsageError):
        make(folder, **settings)


def test_a_folder_of_another_kind(folder, tiny_model_dir, tmp_path):
    with pytest.raises(ModelError, match=r"missing: openvino_model\.xml"):
        make(tiny_model_dir)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(b"<net/>" if file.suffix == ".xml" else file.read_bytes())
    found = make(tmp_path)
    with pytest.raises(ModelError, match="can't run the model"):
        found.start()
    found.close()


def test_a_file_of_rows(folder, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"query": f"Say {k}."}) + "\n" for k in range(5)))
    out = tmp_path / "out.jsonl"
    words = ["infer", "--model", str(folder), "--infer_backend", "openvino", "--device", "cpu", "--temperature", "0"]
    words += ["--val_dataset", str(rows), "--result_path", str(out), "--max_new_tokens", "5", "--kv_cache_gib", "0.01"]
    assert cli.main(words) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 5 and all(line["status"] == "ok" for line in lines)


def test_it_says_when_it_is_missing(tiny_model_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "openvino_genai", None)
    for file in tiny_model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name in ("openvino_model.xml", "openvino_model.bin"):
        (tmp_path / name).write_text("<net/>")
    with pytest.raises(DependencyError, match="openvino_genai"):
        make(tmp_path)
