"""openvino-genai behind our interface: a tiny model converted here, asked for what Hugging Face answers."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import Answer, ask, generated, submit
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
    if importlib.util.find_spec("openvino_genai") is None:  # importing it would tell a statistics server
        pytest.skip("openvino-genai isn't installed")
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


def test_the_repetition_penalty_and_least_lengths_are_those_of_hugging_face(backend, model):
    wanted = generated(model, PROMPTS[3], 12, eos_token_id=None, repetition_penalty=1.7)
    (answer,) = ask(backend, Request("r", PROMPTS[3], replace(GREEDY, repetition_penalty=1.7)))
    assert answer.tokens == wanted
    end = generated(model, PROMPTS[3], 12, eos_token_id=None)[2]
    wanted = generated(model, PROMPTS[3], 12, eos_token_id=end, min_new_tokens=5)
    least = replace(GREEDY, stop_token_ids=(end,), min_new_tokens=5)
    assert wanted != generated(model, PROMPTS[3], 12, eos_token_id=end)
    assert ask(backend, Request("r", PROMPTS[3], least))[0].tokens == wanted


def logprobs_of(model, prompt: list[int], tokens: list[int]) -> list[float]:
    """Of the answer's tokens, by the model's own scores."""
    with torch.no_grad():
        scores = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return scores[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, repetition_penalty=1.7),
        replace(GREEDY, temperature=0.05),
        replace(GREEDY, temperature=5.0, top_p=0.5, top_k=50, min_p=0.2),
    ],
)
def test_log_probabilities_are_those_before_everything_else(params, backend, model):
    requests = [Request(f"r{k}", prompt, replace(params, logprobs=0)) for k, prompt in enumerate(PROMPTS)]
    for answer, prompt in zip(ask(backend, *requests), PROMPTS, strict=True):
        assert [entry.token for entry in answer.logprobs] == answer.tokens
        assert [entry.logprob for entry in answer.logprobs] == pytest.approx(
            logprobs_of(model, prompt, answer.tokens), abs=1e-4
        )
    (without,) = ask(backend, Request("r", PROMPTS[0], params))
    assert all(update.logprobs is None for update in without.updates)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.02}, {"min_p": 0.7}, {"top_k": 20, "top_p": 0.5}])
def test_candidates_are_those_of_transformers(filters, backend, model):
    given = {"top_k": 0, "top_p": 1.0, **filters}
    with torch.no_grad():
        scores = model(torch.tensor([PROMPTS[1]])).logits[0, -1] / 0.2
    chances, order = scores.softmax(-1).sort(descending=True)
    chances = chances[: given["top_k"] or None]
    chances = chances / chances.sum()
    kept = ((chances.cumsum(0) - chances) < given["top_p"]) & (chances >= filters.get("min_p", 0) * chances[0])
    allowed = set(order[: len(chances)][kept].tolist())
    params = replace(GREEDY, max_new_tokens=1, temperature=0.2, **filters)
    drawn = [Request(str(k), PROMPTS[1], replace(params, seed=str(k))) for k in range(60)]
    found = {answer.tokens[0] for answer in ask(backend, *drawn)}
    assert len(found) > 1 and found <= allowed and len(allowed) < 200


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


@pytest.mark.parametrize("values", [{"temperature": 1e-50}, {"top_p": 1e-50}, {"min_p": 1.0}, {"min_p": 1 - 1e-12}])
def test_values_at_their_edge_are_greedy_and_harm_nobody(values, backend):
    (answer,) = ask(backend, Request("r", PROMPTS[0], replace(GREEDY, **{"temperature": 1.0, **values})))
    assert answer.tokens == ask(backend, Request("g", PROMPTS[0], GREEDY))[0].tokens


def test_what_the_library_refuses_ends_one_request(backend):
    refused = Answer()
    backend._loop.call(lambda: backend._core.add(Request("r", [], GREEDY), refused.take))
    assert "refuses the request" in str(refused.wait().last.error)
    assert ask(backend, Request("r", PROMPTS[0], GREEDY))[0].last.finish_reason == "length"


def test_more_requests_than_the_cache_holds(folder, model):
    found = make(folder, kv_cache_gib=0.0006, max_batch_size=16)  # 39 blocks of 32 tokens
    found.start()
    requests = [Request(f"r{k}", list(range(3 + k, 60 + k)), replace(GREEDY, max_new_tokens=60)) for k in range(16)]
    wanted = [generated(model, request.prompt, 60, eos_token_id=None) for request in requests[:4]]
    assert [answer.tokens for answer in ask(found, *requests)[:4]] == wanted
    assert found._loop.call(found._core._pipeline.get_metrics).max_cache_usage > 95
    draw = random.Random(0)
    for number in range(4):
        several = [replace(request, id=f"{number}.{request.id}") for request in requests]
        answers = submit(found, *several)
        for request in several:
            if draw.random() < 0.6:
                found.cancel(request.id)
        assert {answer.wait().last.finish_reason for answer in answers} == {"length", "cancelled"}
    assert ask(found, requests[0])[0].tokens == wanted[0]
    found.close()


def running(*answers: Answer) -> None:
    """Wait until each has its first token."""
    deadline = time.monotonic() + 60
    while not all(answer.updates for answer in answers):
        assert time.monotonic() < deadline, "no answer begins"
        time.sleep(0.001)


def test_the_library_lets_go_of_who_left_and_who_stopped(backend):
    def unfinished() -> bool:
        return backend._loop.call(backend._core._pipeline.has_non_finished_requests, idle=True)

    long = replace(GREEDY, max_new_tokens=400)
    (left,) = submit(backend, Request("l", PROMPTS[0], long))
    running(left)
    backend.cancel("l")
    assert left.wait().last.finish_reason == "cancelled" and not unfinished()
    text = ask(backend, Request("t", PROMPTS[0], GREEDY))[0].text
    (stopped,) = ask(backend, Request("s", PROMPTS[0], replace(long, stop=(text[2:4],))))
    assert stopped.last.finish_reason == "stop" and not unfinished()


def test_nothing_is_left_at_the_end(folder, capfd):
    found = make(folder)
    found.start()
    long = replace(GREEDY, max_new_tokens=400)
    answers = submit(found, *(Request(str(k), prompt, long) for k, prompt in enumerate(PROMPTS)))
    running(*answers)
    found.close()
    assert {answer.wait().last.finish_reason for answer in answers} == {"cancelled"}
    assert found._core._pipeline is None
    assert "leaked" not in "".join(capfd.readouterr())  # what the library says of blocks that nobody gave back


def test_its_use_is_told_to_nobody(tmp_path):
    """Importing OpenVINO by itself writes an id into the home folder and sends it to a statistics server."""
    if importlib.util.find_spec("openvino_genai") is None:
        pytest.skip("openvino-genai isn't installed")
    code = "from swift.models.openvino import load_genai; load_genai(); import openvino"
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | {"HOME": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert not (tmp_path / "intel").exists()


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (replace(GREEDY, logprobs=1), "logprobs 1 is not possible: 0 at most"),
        (replace(GREEDY, prompt_logprobs=0), "prompt_logprobs"),
        (replace(GREEDY, presence_penalty=0.5), "presence_penalty means something else"),
        (replace(GREEDY, frequency_penalty=-0.5), "frequency_penalty means something else"),
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
