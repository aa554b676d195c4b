"""llama.cpp's own server: how it is asked, how its stream is read, and (where one is installed) what it answers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from engines import ask, generated, prompts, requests_for, submit
from gguf_files import write_gguf

from swift.config import InferConfig, build_config
from swift.core.errors import SwiftError, UsageError
from swift.inference.backends.base import ModelInfo
from swift.inference.backends.choose import make_backend, running_backend
from swift.inference.backends.dialect import Enough
from swift.inference.backends.llama_server import LlamaServer
from swift.inference.loading import prepare
from swift.inference.requests import Request, SamplingParams, Structure

INFO = ModelInfo(1024, 2048, (2,), frozenset({"logprobs", "penalties", "logit_bias", "min_p"}))
GREEDY = SamplingParams(max_new_tokens=20)


@pytest.fixture
def dialect(tokenizer):
    return LlamaServer(tokenizer, [2])


def chunk(token, said, predicted, *, logprob=-7.0, top=()):
    """As build 11549 answers `/completion` with `stream`, `return_tokens` and `n_probs`."""
    tops = [{"id": each, "token": "", "bytes": [], "logprob": value} for each, value in top]
    entry = {"id": token, "token": "", "bytes": list(said), "logprob": logprob, "top_logprobs": tops}
    return {
        "index": 0,
        "content": said.decode(errors="replace"),
        "tokens": [token],
        "stop": False,
        "id_slot": -1,
        "tokens_predicted": predicted,
        "tokens_evaluated": 4,
        "completion_probabilities": [entry],
    }


def end(kind, predicted):
    return {"index": 0, "content": "", "tokens": [], "stop": True, "stop_type": kind, "tokens_predicted": predicted}


def read(dialect, params, *chunks):
    """All updates, and whether the reader has had enough."""
    reader, updates = dialect.reader(Request("r", [5, 6], params)), []
    try:
        for each in chunks:
            updates += reader(each)
    except Enough:
        return updates, True
    return updates, False


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def pieces(tokenizer, text):
    """Tokens of a text with their bytes; the server holds back those that end within a character."""
    backs = {chr(b): b for b in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
    others = [b for b in range(256) if b not in backs.values()]
    backs |= {chr(0x100 + k): b for k, b in enumerate(others)}
    tokens = ids(tokenizer, text)
    return [(t, bytes(backs[c] for c in word)) for t, word in zip(tokens, tokenizer.convert_ids_to_tokens(tokens))]


def stream(tokenizer, text):
    """What the server sends for a text."""
    chunks, held = [], b""
    for k, (token, piece) in enumerate(pieces(tokenizer, text), start=1):
        held += piece
        try:
            held.decode()
        except UnicodeDecodeError:
            continue
        chunks.append(chunk(token, held, k))
        held = b""
    return chunks


def test_a_request_is_asked_with_every_setting_said(dialect):
    params = SamplingParams(
        max_new_tokens=9, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.2,
        logit_bias=((7, 1.5),), seed="a",
    )  # fmt: skip
    call = dialect.question(Request("r", [5, 6, 7], params), "", INFO)
    body = dict(call.body)
    assert call.path == "/completion"
    assert isinstance(body.pop("seed"), int)
    assert body == {
        "prompt": [5, 6, 7], "stream": True, "return_tokens": True, "cache_prompt": True, "n_predict": 9,
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"], "temperature": 0.5, "top_k": 3,
        "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.2, "repeat_last_n": 12, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "n_probs": 1, "post_sampling_probs": False, "logit_bias": [[7, 1.5]],
    }  # fmt: skip
    assert dialect.question(Request("r", [5] * 1020, params), "", INFO).body["n_predict"] == 4


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(ignore_eos=True),
        SamplingParams(max_new_tokens=5, min_new_tokens=2),
    ],
)
def test_what_means_something_else_there_is_refused_by_name(dialect, params):
    with pytest.raises(UsageError) as caught:
        dialect.question(Request("r", [5], params), "", INFO)
    assert getattr(params, caught.value.where) != getattr(SamplingParams(), caught.value.where)


def test_tokens_within_characters_are_told_from_the_bytes(dialect, tokenizer):
    text = "a 雨 fell 🤖🤖, é"
    chunks = stream(tokenizer, text)
    assert len(chunks) < len(ids(tokenizer, text)), "the server leaves tokens out"
    updates, _ = read(dialect, SamplingParams(), *chunks, end("limit", len(ids(tokenizer, text))))
    assert [token for update in updates for token in update.tokens] == ids(tokenizer, text)
    assert "".join(update.text for update in updates) == text
    assert updates[-1].finish_reason == "length"


def test_what_can_not_be_told_is_an_error(dialect, tokenizer):
    chunks = stream(tokenizer, "a 雨")
    with pytest.raises(SwiftError, match="log-probabilities"):
        read(dialect, SamplingParams(logprobs=0), *chunks)
    with pytest.raises(SwiftError, match="can't be told"):
        read(dialect, SamplingParams(), {**chunks[-1], "tokens_predicted": 9})
    with pytest.raises(SwiftError, match="ended within a character"):
        read(dialect, SamplingParams(), chunks[0], end("limit", 2))
    with pytest.raises(ValueError, match="gives no tokens back"):
        read(dialect, SamplingParams(), {"content": "a", "stop": False})


def test_an_answer_ends_where_it_ends_elsewhere(dialect, tokenizer):
    chunks = stream(tokenizer, "one two three")
    for params, text, reason in (
        (SamplingParams(stop=("two",)), "one ", "two"),
        (SamplingParams(stop_token_ids=(chunks[1]["tokens"][0],)), None, chunks[1]["tokens"][0]),
    ):
        updates, enough = read(dialect, params, *chunks)
        assert enough, "the server would go on"
        assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", reason)
        assert text is None or "".join(update.text for update in updates) == text
    updates, enough = read(dialect, SamplingParams(), chunks[0], chunk(2, b"", 2))
    assert enough
    assert (updates[-1].tokens, updates[-1].text, updates[-1].stop_reason) == ([2], "", None)
    updates, _ = read(dialect, SamplingParams(), chunks[0], end("eos", 1))
    assert updates[-1].finish_reason == "stop"


def test_logprobs_are_read(dialect, tokenizer):
    token = ids(tokenizer, "one")[0]
    updates, _ = read(dialect, SamplingParams(logprobs=1), chunk(token, b"one", 1, top=[(8, -9.0), (7, -6.0)]))
    (entry,) = updates[0].logprobs
    assert (entry.token, entry.logprob, entry.top) == (token, -7.0, ((7, -6.0),))


_SERVE = """
import sys, xllamacpp as x
p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.warmup = sys.argv[1], 4096, 4, False
p.cpuparams.n_threads = 1
p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
s = x.Server(p)
print("at", s.listening_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server(tiny_model_dir, tmp_path_factory):
    """llama.cpp's server as the package xllamacpp has it; its address."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp isn't installed")
    pytest.importorskip("aiohttp")
    file = write_gguf(tiny_model_dir, tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    child = subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    yield next(line.split()[1] for line in child.stdout if line.startswith("at "))
    child.kill()
    child.communicate()


@pytest.fixture(scope="module")
def backend(server, tiny_model_dir):
    flags = {"model": str(tiny_model_dir), "device": "cpu", "infer_backend": "llamacpp", "engine_url": server}
    backend = running_backend(prepare(build_config(InferConfig, flags)))
    yield backend
    backend.close()


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.3}])
def test_greedy_answers_are_those_of_generate(backend, tiny_model, settings):
    wanted = requests_for(prompts(12, vocab=2000), SamplingParams(max_new_tokens=20, **settings))
    for request, answer in zip(wanted, ask(backend, *wanted), strict=True):
        assert answer.last.error is None
        assert answer.tokens == generated(tiny_model, request.prompt, 20, eos_token_id=2, **settings)


def test_logprobs_are_the_model_s(backend, tiny_model):
    request = Request("r", [300, 301], SamplingParams(max_new_tokens=3, logprobs=2, logit_bias=((77, 100.0),)))
    answer = ask(backend, request)[0]
    assert answer.tokens == [77, 77, 77]
    with torch.no_grad():
        scores = tiny_model(torch.tensor([request.prompt + answer.tokens])).logits[0].log_softmax(-1)
    for place, entry in enumerate(answer.logprobs, start=1):
        assert entry.logprob == pytest.approx(scores[place, 77].item(), abs=1e-5)
        assert [token for token, _ in entry.top] == scores[place].topk(2).indices.tolist()


def test_equal_seeds_give_equal_answers(backend):
    params = [SamplingParams(max_new_tokens=12, temperature=1.0, top_k=20, seed=seed) for seed in ("a", "a", "b")]
    first, second, other = (ask(backend, Request(f"s{k}", [300, 301], each))[0] for k, each in enumerate(params))
    assert first.tokens == second.tokens != other.tokens


def test_a_request_that_is_left_gives_its_slot_back(backend, server):
    long = SamplingParams(max_new_tokens=900, logit_bias=((77, 100.0),))
    answers = submit(backend, *requests_for([[5, 6]] * 4, long, name="long"))
    for k, answer in enumerate(answers):
        while len(answer.updates) < 2:
            assert not answer.ended.wait(0.005)
        backend.cancel(f"long{k}")
        assert answer.wait().last.finish_reason == "cancelled"
    short = ask(backend, Request("short", [5, 6], SamplingParams(max_new_tokens=3)))[0]
    assert short.last.finish_reason == "length"
    for _ in range(200):
        with urllib.request.urlopen(f"{server}/slots") as reply:
            if b'"is_processing":true' not in reply.read():
                return
        time.sleep(0.05)
    pytest.fail("slots are still held after 10 s")


def test_structures_are_refused_by_name(backend):
    with pytest.raises(UsageError, match="structure"):
        submit(backend, Request("r", [5], SamplingParams(structure=Structure("json"))))


def test_settings_of_an_engine_that_runs_already_are_refused(tiny_model_dir):
    flags = {"model": str(tiny_model_dir), "device": "cpu", "infer_backend": "llamacpp", "kv_cache_gib": 1}
    with pytest.raises(UsageError, match="kv_cache_gib"):
        make_backend(prepare(build_config(InferConfig, {**flags, "engine_url": "http://127.0.0.1:9"})))
