"""What runs inside of vLLM's processes, without vLLM: which weights belong together, and who gets in."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from swift.inference.backends import vllm_worker
from swift.inference.backends.vllm_worker import Guard, Weights

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ATTENTION = [f"model.layers.{n}.self_attn.{x}_proj.weight" for n in (0, 1) for x in "qkvo"]
EXPERTS = [f"model.layers.0.mlp.experts.{n}.{x}_proj.weight" for n in (0, 1) for x in ("gate", "up", "down")]
NAMES = [*ATTENTION, *EXPERTS, "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias", "lm_head.weight"]


def saved(folder: Path, names: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    half = len(names) // 2
    for part, some in enumerate((names[:half], names[half:])):
        save_file({name: torch.full((2,), float(len(name))) for name in some}, folder / f"part-{part}.safetensors")
    return folder


class Method:
    """Lays weights out for a layer, as vLLM does for CPUs."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.laid_out = layer.weight.clone()


class Layer(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.quant_method = Method()
        self.quant_method.process_weights_after_loading(self)


class Worker(Weights):
    """As much of vLLM's worker as is used."""

    def __init__(self, folder: Path) -> None:
        shared = nn.Parameter(torch.zeros(3), requires_grad=False)
        alone = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.model = nn.ModuleList([Layer(shared), Layer(shared), Layer(alone)])
        self.model.packed_modules_mapping = PACKED  # type: ignore[assignment]
        self.model_config = SimpleNamespace(model=str(folder))
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.loaded: dict[str, torch.Tensor] = {}

    def reload_weights(self, weights_iterator: Any) -> None:
        self.loaded = dict(weights_iterator)
        for layer in self.model:
            layer.weight.fill_(1)


@pytest.fixture
def worker(tmp_path):
    return Worker(saved(tmp_path / "model", NAMES))


def test_all_weights_are_handed_over_as_they_are(worker, tmp_path):
    assert worker.swift_update_weights(str(saved(tmp_path / "new", NAMES))) == {"success": True}
    assert sorted(worker.loaded) == sorted(NAMES)
    assert all(value.tolist() == [len(name)] * 2 for name, value in worker.loaded.items())


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ([ATTENTION[0]], "layers.0.self_attn.k_proj.weight is missing, and 1 more"),
        (ATTENTION[4:6], "layers.1.self_attn.v_proj.weight is missing"),
        ([EXPERTS[0]], "layers.0.mlp.experts.0.down_proj.weight is missing, and 4 more"),
    ],
)
def test_a_part_of_what_vllm_holds_as_one_is_refused_untouched(given, missing, worker, tmp_path):
    answer = worker.swift_update_weights(str(saved(tmp_path / "new", given)))
    assert answer["success"] is False and answer["message"].endswith(missing)
    assert not worker.loaded


@pytest.mark.parametrize(
    "given", [ATTENTION[:3], [ATTENTION[3]], EXPERTS, ["lm_head.weight"], ["model.layers.0.self_attn.q_proj.bias"]]
)
def test_whole_layers_may_change_alone(given, worker, tmp_path):
    assert worker.swift_update_weights(str(saved(tmp_path / "new", given)))["success"]
    assert sorted(worker.loaded) == sorted(given)


def test_a_tied_layer_is_laid_out_anew(worker, tmp_path):
    worker.swift_update_weights(str(saved(tmp_path / "new", NAMES)))
    first, second, alone = worker.model
    assert first.laid_out.tolist() == second.laid_out.tolist() == [1, 1, 1]
    assert alone.laid_out.tolist() == [0, 0, 0]  # vLLM itself has seen to it


def test_nothing_of_swift_is_needed():
    """The file is copied to where swift isn't installed."""
    code = f"""
import runpy, sys
runpy.run_path({vllm_worker.__file__!r})
assert not any("swift" in name for name in sys.modules)
"""
    assert subprocess.run([sys.executable, "-I", "-S", "-c", code], check=False).returncode == 0


def asked(path: str, headers: list[tuple[bytes, bytes]], kind: str = "http") -> list[Any]:
    """What comes back from behind the guard."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("inside")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "path": path, "headers": headers, "method": "OPTIONS"}
    asyncio.run(Guard(app)(scope, None, send))
    return sent


@pytest.mark.parametrize(
    ("path", "headers", "kind", "inside"),
    [
        ("/health", [], "http", True),
        ("/collective_rpc", [(b"authorization", b"Bearer right")], "http", True),
        ("/collective_rpc", [(b"authorization", b"Bearer wrong")], "http", False),
        ("/collective_rpc", [], "http", False),
        ("/health/", [], "http", False),
        ("/v1/models", [(b"authorization", b"right")], "http", False),
        ("/x", [(b"authorization", "Bearer \xe9".encode("latin-1"))], "http", False),
        ("/v1/realtime", [], "websocket", False),
        ("", [], "lifespan", True),
    ],
)
def test_only_who_has_the_key_gets_in(path, headers, kind, inside, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "right")
    answer = asked(path, headers, kind)
    assert (answer == ["inside"]) is inside
    if not inside:
        assert answer[0].get("status") == 401 or answer[0]["type"] == "websocket.close"
