"""Engines of other projects by their names in `--infer_backend`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swift.inference.backends.base import Backend
    from swift.inference.loading import Prepared


def external(prepared: Prepared) -> Backend:
    """The engine that `--infer_backend` names; it isn't started yet.

    Raises:
        UsageError: it isn't driven with these settings. DependencyError: it isn't installed.
    """
    name = prepared.config.engine.infer_backend
    if name in ("auto", "vllm"):  # auto: where vLLM is installed and there is a GPU
        from swift.inference.backends.served import served_backend
        from swift.inference.backends.vllm import VLLM

        return served_backend(VLLM, prepared)
    if name == "llamacpp":
        from swift.inference.backends.llamacpp import llamacpp_backend

        return llamacpp_backend(prepared)
    if name == "sglang":
        from swift.inference.backends.sglang import sglang_backend

        return sglang_backend(prepared)
    if name == "lmdeploy":
        from swift.inference.backends.lmdeploy import lmdeploy_backend

        return lmdeploy_backend(prepared)
    from swift.inference.backends.openvino import openvino_backend

    return openvino_backend(prepared)
