"""Which backend runs a model, and the backend itself with the weights in it."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel, PeftType

from swift.config import InferConfig
from swift.config.engine import InferBackend
from swift.config.engine_checks import paged_settings
from swift.core.errors import ModelError, SwiftError, UsageError
from swift.core.logging import get_logger, world_size
from swift.inference.backends.base import Backend
from swift.inference.backends.transformers import TransformersBackend

if TYPE_CHECKING:
    from swift.inference.backends.swift import SwiftBackend
    from swift.inference.loading import Prepared

log = get_logger("inference")


def wanted_backend(config: InferConfig) -> InferBackend:
    """What `--infer_backend` means on this machine; with `auto`, a model that swift can't run goes to transformers."""
    engine = config.engine
    if engine.infer_backend != "auto":
        return engine.infer_backend
    if config.model.attn_impl != "auto":  # the paged engine attends by itself
        return "transformers"
    vllm = torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None
    return "vllm" if vllm and not paged_settings(engine) else "swift"


def make_backend(prepared: Prepared) -> Backend:
    """The backend that `--infer_backend` asks for, the weights read; it isn't started yet.

    Raises:
        ModelError: weights that don't fit, or a merge that changes the answers; or the backend can't run the model.
        UsageError: settings that the backend for this model doesn't have.
        SwiftError: the backend isn't installed.
    """
    wanted = wanted_backend(prepared.config)
    if wanted == "transformers":
        return _transformers(prepared, prepared.weights())
    if wanted != "swift":
        from swift.inference.backends.external import external

        return external(prepared)
    return _paged(prepared)


def running_backend(prepared: Prepared) -> Backend:
    """The backend that `--infer_backend` asks for, started.

    With `auto`, a model whose answers over a paged cache turn out to be others goes to transformers.

    Raises:
        SwiftError: as `make_backend`; or it doesn't start.
    """
    backend = make_backend(prepared)
    try:
        backend.start()
        return backend
    except ModelError as error:
        backend.close()
        if backend.name != "swift" or prepared.config.engine.infer_backend != "auto":
            raise
        reason = error.message
    except BaseException:
        backend.close()
        raise
    fallback = _instead(prepared, prepared.weights(), reason)
    fallback.start()
    return fallback


def _paged(prepared: Prepared) -> Backend:
    """Our own engine; with `auto`, transformers for a model that it can't run."""
    from swift.inference.backends.swift import SwiftBackend
    from swift.inference.paged.fit import paged_unsupported_reason

    config = prepared.config.engine
    if prepared.config.model.attn_impl != "auto":
        raise UsageError(
            f"the paged engine attends by itself, not by {prepared.config.model.attn_impl}",
            where="--attn_impl",
            fix="leave it out, or --infer_backend transformers",
        )
    if config.tensor_parallel_size > 1:
        return _spread(prepared)
    model = prepared.weights()
    adapted = isinstance(model, PeftModel)
    inner: Any = model.get_base_model() if adapted else model  # the adapter's layers are in there
    reason = paged_unsupported_reason(inner)
    if reason is not None and config.infer_backend == "auto":
        return _instead(prepared, model, reason)
    draft = None if config.draft_model is None else prepared.draft_weights()
    stops = prepared.stop_token_ids()
    owned = not adapted or not _reads_weights(model)
    try:
        return SwiftBackend(inner, prepared.tokenizer, config, stop_token_ids=stops, owned=owned, draft_model=draft)
    except ModelError as error:
        if config.infer_backend != "auto":
            raise
        reason = error.message
    return _instead(prepared, prepared.weights(), reason)  # read anew: layers were exchanged


def _reads_weights(model: PeftModel) -> bool:
    """Whether an adapter computes with the weights of the layers that it sits on, instead of adding to their output."""
    wrappers = ("modules_to_save", "trainable_token_indices", "target_parameters")
    configs: list[Any] = list(model.peft_config.values())
    return any(
        config.peft_type != PeftType.LORA or config.use_dora or any(getattr(config, name, None) for name in wrappers)
        for config in configs
    )


def _spread(prepared: Prepared) -> SwiftBackend:
    """The engine over several processes; each of them calls this."""
    from swift.inference.backends.swift import SwiftBackend
    from swift.inference.paged.spread import gather_crew, spread_model, start_of

    config = prepared.config
    size = config.engine.tensor_parallel_size
    where = f"--tensor_parallel_size {size}"
    if world_size() != size:
        raise UsageError(
            f"a model over {size} processes needs these, and there are {world_size()}",
            where=where,
            fix="swift deploy starts them by itself",
        )
    wrong = {
        "adapters": "merge the adapter first: swift merge-lora" if prepared.adapter is not None else "",
        "draft_model": "leave it out" if config.engine.draft_model is not None else "",
        "weight_format": "leave it out" if config.engine.weight_format != "auto" else "",
    }
    for name, fix in wrong.items():
        if fix:
            raise UsageError(f"--{name} and a model over several processes don't go together", where=where, fix=fix)
    crew = gather_crew(size, prepared.device.type)
    start = start_of(prepared.base, config.model, prepared.dtype)
    model = spread_model(crew, start, torch.device(prepared.device.torch_device))
    return SwiftBackend(model, prepared.tokenizer, config.engine, stop_token_ids=prepared.stop_token_ids(), crew=crew)


def follow(prepared: Prepared) -> None:
    """What the processes of a spread model do that aren't the first one: compute what it says, until it ends.

    Raises:
        SwiftError: the model can't be spread, or the first process is gone.
    """
    backend = _spread(prepared)
    try:
        backend.follow()
    except RuntimeError as error:  # gloo's answer to a connection that breaks
        raise SwiftError(f"the first process is gone: {str(error).splitlines()[0]}") from error


def _instead(prepared: Prepared, model: Any, reason: str) -> Backend:
    """transformers, for a model that the paged engine can't run."""
    if given := paged_settings(prepared.config.engine):
        raise UsageError(
            f"{given[0]} is a setting of the paged engine, which can't run this model: {reason}",
            where=f"--{given[0]}",
            fix=f"leave out {given[0]}: transformers' generate runs the model",
        )
    log.info("transformers' generate runs the model; the paged engine can't: %s", reason)
    return _transformers(prepared, model)


def _transformers(prepared: Prepared, model: Any) -> Backend:
    return TransformersBackend(
        model,
        prepared.tokenizer,
        prepared.stop_token_ids(),
        max_batch_size=prepared.config.engine.max_batch_size,
    )
