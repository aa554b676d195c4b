"""Records what vLLM's server answers to what this program asks of it, into `vllm/`.

    export SWIFT_TEST_VLLM_PYTHON=.venv-vllm/bin/python
    OMP_NUM_THREADS=1 .venv/bin/python tests/inference/recorded/record_vllm.py

A tiny random model is served by vLLM for CPUs, once with and once without room for adapters. Ids, times and folders are
replaced, so a second recording with the same version says the same. `/sleep` and `/wake_up` are recorded too, though
vLLM for CPUs only says that it does them.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import json  # noqa: E402

import torch  # noqa: E402
from fixtures import build_tiny_model  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from replay_server import Asked, write_recording  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from swift.config import InferConfig, build_config  # noqa: E402
from swift.inference.backends.choose import running_backend  # noqa: E402
from swift.inference.backends.dialect import Call  # noqa: E402
from swift.inference.backends.vllm import VllmDialect  # noqa: E402
from swift.inference.loading import prepare  # noqa: E402
from swift.inference.requests import Request, SamplingParams  # noqa: E402

PARAMS = SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=2)
PROMPT = [5, 6, 7, 8]
NAME = "model.layers.0.self_attn.{}_proj.weight"


class Recorder:
    """Asks one server, and keeps what it says."""

    def __init__(self, backend: Any, folder: Path) -> None:
        self.backend = backend
        self._endpoint = backend._endpoint
        self._folder = folder

    def ask(self, name: str, call: Call) -> None:
        query = f"?{urlencode(call.query)}" if call.query else ""
        question = urllib.request.Request(
            f"{self._endpoint.url}{call.path}{query}",
            data=b"" if call.body is None else json.dumps(call.body).encode(),
            headers={"Authorization": f"Bearer {self._endpoint.key}", "Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(question, timeout=120) as answer:
                status, text, kind = answer.status, answer.read().decode(), answer.headers.get_content_type()
        except urllib.error.HTTPError as error:
            status, text, kind = error.code, error.read().decode(), "application/json"
        asked = Asked("POST", call.path, dict(call.query or {}), self._plain(call.body))
        write_recording(f"vllm/{name}.json", asked, status, self._clean(text), stream=kind == "text/event-stream")
        print(name, status)

    def _clean(self, text: str) -> str:
        text = re.sub(r'"(id|system_fingerprint)":"[^"]*"', r'"\1":"same"', text)
        text = re.sub(r'"created":\d+', '"created":0', text)
        return text.replace(str(self._folder), "/recorded")

    def _plain(self, body: Any) -> Any:
        return None if body is None else json.loads(self._clean(json.dumps(body, separators=(",", ":"))))


def adapter_at(folder: Path, model: Path, **more: Any) -> Path:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False, **more)
    get_peft_model(base, config).save_pretrained(folder)
    return folder


def weights_at(folder: Path, model: Path, parts: str) -> Path:
    folder.mkdir()
    state = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    save_file({NAME.format(part): state[NAME.format(part)] for part in parts}, folder / "weights-00001.safetensors")
    return folder


def record(python: str, folder: Path) -> None:
    model = build_tiny_model(folder / "model", hidden_size=128, intermediate_size=256, initializer_range=0.3)
    dialect = VllmDialect()

    def started(**more: Any) -> Recorder:
        values = {"model": str(model), "device": "cpu", "max_model_len": 64, "infer_backend": "vllm"}
        config = build_config(InferConfig, {**values, "engine_python": python, **more})
        return Recorder(running_backend(prepare(config)), folder)

    def question(params: SamplingParams, adapter: str | None = None) -> Call:
        return dialect.question(Request("r", PROMPT, params, adapter=adapter), "model", recorder.backend.info)

    recorder = started()
    recorder.ask("stream", question(PARAMS))
    recorder.ask("whole", question(SamplingParams(max_new_tokens=1, prompt_logprobs=2)))
    refused = question(PARAMS)
    recorder.ask("refused", Call(refused.path, {**(refused.body or {}), "temperature": -1.0}))
    update, forget = dialect.update_weights(weights_at(folder / "weights", model, "qkv"))
    recorder.ask("update", update)
    recorder.ask("forget", forget)
    recorder.ask("update-refused", dialect.update_weights(weights_at(folder / "part", model, "q"))[0])
    broken = weights_at(folder / "broken", model, "qkv") / "weights-00002.safetensors"
    broken.write_bytes((2).to_bytes(8, "little") + b"no")
    recorder.ask("update-broken", dialect.update_weights(broken.parent)[0])
    for level in (1, 2):
        recorder.ask(f"sleep-{level}", dialect.sleep(level)[0])
        recorder.ask(f"wake-{level}", dialect.wake(level)[0])
    recorder.backend.close()

    recorder = started(enable_lora=True)
    recorder.ask("load-adapter", dialect.load_adapter("a", adapter_at(folder / "a", model))[0])
    recorder.ask("stream-adapter", question(PARAMS, adapter="a"))
    odd = adapter_at(folder / "odd", model, use_dora=True)
    recorder.ask("load-adapter-refused", dialect.load_adapter("odd", odd)[0])
    unload, forget_adapters, _ = dialect.unload_adapter("a")
    recorder.ask("unload-adapter", unload)
    recorder.ask("forget-adapters", forget_adapters)
    recorder.backend.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        record(os.environ["SWIFT_TEST_VLLM_PYTHON"], Path(scratch).resolve())
