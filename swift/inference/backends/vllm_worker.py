"""What runs inside of vLLM's own processes: weights that are replaced, and a key for every door of its server.

A copy of this file lies in the folder of a server that was started here. Its environment has no swift, so nothing of
swift is imported, and what vLLM has is reached by what it documents: `--worker-extension-cls`, `--middleware`, the
workers' `reload_weights`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Weights:
    """Mixed into vLLM's worker class, and called by the names of its methods (`/collective_rpc`)."""

    swift_names: frozenset[str] | None = None  # of all weights in the model's files, once they are known

    def swift_update_weights(self: Any, folder: str) -> dict[str, Any]:
        """Replace the weights that are in the safetensors files of `folder`, by their names in the model's files.

        Returns:
            `success`; where it is False, `message` says why nothing was replaced. An error that is raised leaves the
            model in between.
        """
        model = self.model_runner.get_model()
        if self.swift_names is None:
            self.swift_names = frozenset(_names_in(Path(self.model_config.model)))
        given = frozenset(_names_in(Path(folder)))
        if missing := sorted(_groups_of(given, self.swift_names, getattr(model, "packed_modules_mapping", {})) - given):
            return {
                "success": False,
                "message": f"vLLM holds some weights as one and takes them together only: {missing[0]} is missing"
                + (f", and {len(missing) - 1} more" if len(missing) > 1 else ""),
            }
        self.reload_weights(weights_iterator=_read(Path(folder)))
        _pack_tied(model)
        return {"success": True}

    def swift_forget_adapters(self: Any) -> None:
        """Let go of all adapters; those that requests still name are read again from their folders."""
        self.model_runner.reset_lora_state()


def _groups_of(given: frozenset[str], known: frozenset[str], packed: dict[str, list[str]]) -> set[str]:
    """All weights that share a layer with one of `given`: what is packed into one, and the experts of a layer."""
    group_of = {part: group for group, parts in packed.items() for part in parts}

    def layer(name: str) -> str:
        head, experts, _ = name.partition(".experts.")
        if experts:
            return head + experts
        module, _, kind = name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        return f"{parent}.{group_of.get(leaf, leaf)}.{kind}"

    touched = {layer(name) for name in given}
    return {name for name in known if layer(name) in touched}


def _pack_tied(model: Any) -> None:
    """Lay out anew the weights that two layers share: vLLM does it for the one that is named in the files only.

    Without it, a head tied to the embedding goes on multiplying by the old weights where these are held twice (CPUs).
    """
    owners: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = getattr(layer, "_parameters", {}).get("weight")
        if weight is not None and weight.numel():
            owners.setdefault(id(weight), []).append(layer)
    for layers in owners.values():
        for layer in layers if len(layers) > 1 else ():
            method = getattr(layer, "quant_method", None)
            if method is not None and weight_is_on_cpu(layer):
                method.process_weights_after_loading(layer)


def weight_is_on_cpu(layer: Any) -> bool:
    return bool(layer.weight.device.type == "cpu")


def _names_in(folder: Path) -> Iterator[str]:
    """Names of the weights in a folder's safetensors files, from their heads."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            entries = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        yield from (name for name in entries if name != "__metadata__")


def _read(folder: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                yield name, opened.get_tensor(name)


class Guard:
    """Asks for the server's key (VLLM_API_KEY) at every path but `/health`.

    vLLM asks for it below `/v1` only, and the paths that weights and sleep need let their caller run any method of a
    worker.

    Args:
        app: what is behind it (ASGI).
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health" or self._knows(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = json.dumps({"error": {"message": "the key is wrong or missing"}}).encode()
            await send(
                {"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"application/json")]}
            )
            await send({"type": "http.response.body", "body": body})

    def _knows(self, headers: list[tuple[bytes, bytes]]) -> bool:
        return any(
            name.lower() == b"authorization" and secrets.compare_digest(value, self._wanted) for name, value in headers
        )
