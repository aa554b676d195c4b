"""vLLM for CPUs, really run: it answers as our engine does, whatever is done to both.

Runs where SWIFT_TEST_VLLM_PYTHON names the python of an environment with vLLM for CPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import build_tiny_model
from peft import LoraConfig, get_peft_model
from taken import asked
from transformers import AutoModelForCausalLM

from swift.commands.deploy import load_models
from swift.config import DeployConfig, InferConfig, build_config
from swift.core.errors import ModelError, UsageError
from swift.inference.backends.choose import running_backend
from swift.inference.loading import prepare
from swift.inference.requests import Request, SamplingParams, TokenLogprob

PYTHON = os.environ.get("SWIFT_TEST_VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="SWIFT_TEST_VLLM_PYTHON names no python with vLLM"),
]
PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=2)
PROMPTS = [[5, 6, 7, 8], list(range(100, 140)), [900, 3]]


def settings_of(folder: Path, **more: Any) -> InferConfig:
    return build_config(InferConfig, {"model": str(folder), "device": "cpu", "max_model_len": 256, **more})


def model_of(folder: Path, *, tied: bool) -> Path:
    """A tiny model whose heads have a size that vLLM's kernels for CPUs know."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.3}
    return build_tiny_model(folder, tie_word_embeddings=tied, **shape)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def both(request, tmp_path_factory):
    """vLLM and our engine with the same model."""
    yield from pair(model_of(tmp_path_factory.mktemp("vllm-model"), tied=request.param))


@pytest.fixture(scope="module")
def adapting(tmp_path_factory):
    """The same, with an adapter that has a name, as swift deploy makes them."""
    folder = model_of(tmp_path_factory.mktemp("vllm-model"), tied=True)
    named = {"named": str(adapter_at(tmp_path_factory.mktemp("vllm-adapter"), folder, 7))}
    backends = []
    for settings in ({"infer_backend": "vllm", "engine_python": PYTHON}, {"infer_backend": "swift"}):
        values = {"model": str(folder), "device": "cpu", "max_model_len": 256, **settings}
        served = load_models(build_config(DeployConfig, values), [], named)
        assert [model.adapter for model in served] == [None, "named"]
        backends.append(served[0].talker.backend)
    yield Pair(*backends, folder)
    for backend in backends:
        backend.close()


@dataclass(frozen=True)
class Pair:
    vllm: Any
    ours: Any
    folder: Path

    def __iter__(self) -> Iterator[Any]:
        return iter((self.vllm, self.ours))


def pair(folder: Path) -> Iterator[Pair]:
    ours = running_backend(prepare(settings_of(folder, infer_backend="swift")))
    vllm = running_backend(prepare(settings_of(folder, infer_backend="vllm", engine_python=PYTHON)))
    yield Pair(vllm, ours, folder)
    vllm.close()
    ours.close()


def assert_same(both: Pair, adapter: str | None = None, params: SamplingParams = PARAMS) -> list[list[int]]:
    """Both answer with the same tokens and log-probabilities."""
    found = []
    for backend in both:
        requests = [Request(f"r{k}", prompt, params, adapter=adapter) for k, prompt in enumerate(PROMPTS)]
        found.append([taken.whole() for taken in asked(backend, *requests)])
    for their, our in zip(*found, strict=True):
        assert their.tokens == our.tokens
        assert their.finish_reason == our.finish_reason
        assert their.text == our.text.rstrip("\N{REPLACEMENT CHARACTER}")  # vLLM keeps half a character to itself
        assert_close(their.logprobs, our.logprobs)
        if params.prompt_logprobs is not None:
            assert their.prompt_logprobs[0] is our.prompt_logprobs[0] is None
            assert_close(their.prompt_logprobs[1:], our.prompt_logprobs[1:])
    return [answer.tokens for answer in found[0]]


def assert_close(one: list[TokenLogprob], other: list[TokenLogprob]) -> None:
    for their, our in zip(one, other, strict=True):
        assert (their.token, [token for token, _ in their.top]) == (our.token, [token for token, _ in our.top])
        values = [our.logprob, *(value for _, value in our.top)]
        assert [their.logprob, *(value for _, value in their.top)] == pytest.approx(values, abs=1e-3)


def changed(model_dir: Path, seed: int) -> dict[str, torch.Tensor]:
    """Weights of the model with noise on all of them, by their names in its files."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tied = model.config.tie_word_embeddings
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + 0.3 * value.std() * torch.randn(value.shape, generator=generator)
        if value.ndim == 2
        else value * 1.1
        for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }


def adapter_at(folder: Path, model_dir: Path, seed: int, **more: Any) -> Path:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], **more}
    adapted = get_peft_model(model, LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_" in name:
                value.copy_(0.2 * torch.randn(value.shape, generator=generator))
    adapted.save_pretrained(folder)
    return folder


def original(model_dir: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tied = model.config.tie_word_embeddings
    return {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def test_prompts_are_scored_as_by_our_engine(both):
    first = assert_same(both)
    for prompt_logprobs in (0, 2):
        assert assert_same(both, params=replace(PARAMS, prompt_logprobs=prompt_logprobs)) == first
    assert_same(both, params=SamplingParams(max_new_tokens=1, prompt_logprobs=1))


def test_new_weights_answer_as_our_engine_does_with_them_and_the_old_ones_come_back(both):
    model_dir = both.folder
    first = assert_same(both)
    for backend in both:
        backend.update_weights(changed(model_dir, 1).items())
    assert assert_same(both) != first
    for backend in both:
        backend.update_weights(original(model_dir).items())
    assert assert_same(both) == first


def test_some_of_the_weights_may_change(both):
    model_dir = both.folder
    first = assert_same(both)
    new = changed(model_dir, 2)
    some = {name: value for name, value in new.items() if "o_proj" in name or "layers.1.self_attn" in name}
    for backend in both:
        backend.update_weights(some.items())
    assert assert_same(both) != first
    for backend in both:
        backend.update_weights((name, value) for name, value in original(model_dir).items() if name in some)
    assert assert_same(both) == first


def test_what_cant_be_taken_leaves_everything_as_it_was(both):
    model_dir = both.folder
    first = assert_same(both)
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ModelError, match=r"k_proj\.weight is missing, and 1 more"):
        both.vllm.update_weights([(name, changed(model_dir, 3)[name])])
    with pytest.raises(ModelError, match="was given"):
        both.vllm.update_weights([(name, torch.zeros(3, 3))])
    with pytest.raises(ModelError, match=r"no weight model\.extra"):
        both.vllm.update_weights([("model.extra", torch.zeros(3, 3))])
    assert assert_same(both) == first


def test_adapters_by_request_answer_as_they_do_with_our_engine(adapting, tmp_path):
    folder = adapting.folder
    first = assert_same(adapting)
    assert assert_same(adapting, "named") != first
    for backend in adapting:
        backend.unload_adapter("named")
    names = ["a", "b", "c", "d"]
    for seed, name in enumerate(names):
        adapter_at(tmp_path / name, folder, seed)
        for backend in adapting:
            backend.load_adapter(name, tmp_path / name)
    answers = [assert_same(adapting, name) for name in names]
    for name, answer in zip(names, answers, strict=True):
        assert assert_same(adapting, name) == answer
        assert assert_same(adapting) == first
    assert all(answers.count(answer) == 1 and answer != first for answer in answers)
    with pytest.raises(UsageError, match="4 adapters here at most"):
        adapting.vllm.load_adapter("e", tmp_path / "a")

    for backend in adapting:  # with other weights below, an adapter stays
        backend.update_weights(changed(folder, 4).items())
    assert assert_same(adapting, "a") not in answers
    for backend in adapting:
        backend.update_weights(original(folder).items())
    assert assert_same(adapting, "a") == answers[0]

    for seed in (9, 10, 11):  # others of the same name in the same folder
        before = assert_same(adapting, "a")
        adapter_at(tmp_path / "a", folder, seed)
        for backend in adapting:
            backend.unload_adapter("a")
            backend.load_adapter("a", tmp_path / "a")
        assert assert_same(adapting, "a") != before
        assert assert_same(adapting, "b") == answers[1]
        assert assert_same(adapting) == first

    for backend in adapting:
        for name in names:
            backend.unload_adapter(name)
    with pytest.raises(UsageError, match="no adapter a"):
        adapting.vllm.submit(Request("gone", [5], PARAMS, adapter="a"), lambda update: None)
    with pytest.raises(UsageError, match="prompt_logprobs"):
        adapting.vllm.submit(Request("r", [5], replace(PARAMS, prompt_logprobs=1)), lambda update: None)


@pytest.mark.parametrize(
    ("kind", "said"),
    [({"use_dora": True}, "DoRA"), ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"r": 65}, "max_lora_rank")],
)
def test_an_adapter_that_vllm_cant_run_is_refused_in_its_words(kind, said, adapting, tmp_path):
    with pytest.raises(ModelError, match=said):
        adapting.vllm.load_adapter("odd", adapter_at(tmp_path / "odd", adapting.folder, 5, **kind))
    assert "odd" not in adapting.vllm.stats().adapters
    assert_same(adapting)


def test_sleep_is_not_offered_where_vllm_would_stay_awake(both):
    with pytest.raises(UsageError, match="sleep"):
        both.vllm.sleep()


@pytest.mark.parametrize("path", ["/collective_rpc", "/reset_prefix_cache", "/sleep?level=1", "/v1/completions", "/x"])
def test_every_door_asks_for_the_key(path, both):
    question = urllib.request.Request(f"{both.vllm._endpoint.url}{path}", data=b"{}", method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(question)
    assert caught.value.code == 401


OWNER = """
import sys, time
from swift.config import InferConfig, build_config
from swift.inference.backends.choose import running_backend
from swift.inference.loading import prepare

if __name__ == "__main__":
    values = {"model": sys.argv[1], "device": "cpu", "max_model_len": 256, "infer_backend": "vllm"}
    backend = running_backend(prepare(build_config(InferConfig, {**values, "engine_python": sys.argv[2],
                                                                 "adapters": [sys.argv[3]]})))
    print("up", flush=True)
    time.sleep(600)
"""


def descendants(pid: int) -> list[int]:
    """Processes that come from one, the nearest first."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_of_vllm_is_left(number, tmp_path):
    model = model_of(tmp_path / "model", tied=True)
    adapter = adapter_at(tmp_path / "adapter", model, 5)
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, str(script), str(model), str(PYTHON), str(adapter)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    started = descendants(owner.pid)
    assert len(started) >= 3  # the minder, the server, its engine
    owner.send_signal(number)
    owner.wait(60)
    owner.stdout.close()
    deadline = time.monotonic() + 30
    while left := [pid for pid in started if is_running(pid)]:
        assert time.monotonic() < deadline, f"{left} of {started} are left"
        time.sleep(0.1)
