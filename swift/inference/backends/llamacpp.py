"""llama.cpp as a backend: a GGUF file, computed by llama.cpp inside of this program and served by our own engine.

Our engine plans the steps, chooses the tokens and makes the text, as it does for its own models; llama.cpp multiplies
(`swift.inference.gguf`). So what a request may ask for, and what its settings mean, is the same as ever. A
`llama-server` that runs already is spoken to instead where `--engine_url` names one.

On a GPU this has not yet been run.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from swift.config.engine import EngineConfig
from swift.config.engine_checks import paged_settings
from swift.core.devices import Device
from swift.core.errors import ModelError, UsageError
from swift.core.logging import get_logger
from swift.inference.backends.base import EngineStats, ModelInfo
from swift.inference.backends.prompt import check_prompt
from swift.inference.choosing.checks import check_params
from swift.inference.choosing.chooser import Chooser
from swift.inference.gguf.library import MOST_SEQUENCES, CacheDtype, GgufCache, GgufModel
from swift.inference.gguf.runner import GgufRunner
from swift.inference.paged.adapters import AdapterSlots
from swift.inference.paged.blocks import BlockPool
from swift.inference.paged.core import EngineCore, Parts
from swift.inference.paged.loop import EngineLoop
from swift.inference.paged.pace import Pace
from swift.inference.paged.scheduler import Limits, Scheduler
from swift.inference.requests import Request, Sink
from swift.models.gguf import find_gguf
from swift.models.memory import free_memory_bytes

if TYPE_CHECKING:
    from swift.inference.backends.base import Backend
    from swift.inference.loading import Prepared

log = get_logger("inference")

_GIB = 1 << 30
_MOST_ON_CPU = 4 * _GIB
_USUAL_ON_CPU = _GIB  # llama.cpp writes zeros to all of its cache at the start
_MOST_LOGPROBS = 1000  # likeliest tokens that a request may ask for
_USUAL_CACHE: CacheDtype = "float16"  # llama.cpp's own
# settings of our engine that mean the same here
_SHARED = frozenset(
    {
        "max_batch_tokens", "kv_cache_gib", "kv_cache_dtype", "block_size", "enable_prefix_caching", "max_latency_ms",
        "warmup_file",
    }
)  # fmt: skip


def llamacpp_backend(prepared: Prepared) -> Backend:
    """llama.cpp with the model that `prepared` describes; it isn't started yet.

    Raises:
        UsageError: settings that mean nothing here. ModelError: the file can't be run.
        DependencyError: llama-cpp-python isn't installed.
    """
    config, engine = prepared.config, prepared.config.engine
    if engine.engine_url is not None:
        from swift.inference.backends.llama_server import server_backend

        return server_backend(prepared)
    given = [name for name in paged_settings(engine) if name not in _SHARED]
    given += [name for name in ("engine_python", "engine_args") if getattr(engine, name)]
    wrong = {
        **{f"--{name}": "leave it out: llama.cpp runs inside of this program, without it" for name in given},
        **({"--adapters": _MERGE} if prepared.adapter is not None or engine.enable_lora else {}),
        **({"--torch_dtype": "leave it out: the file says how its weights are held"} if _has_dtype(prepared) else {}),
        **({"--rope_scaling": "leave it out: the file says it"} if config.model.rope_scaling else {}),
        **({"--attn_impl": "leave it out: llama.cpp attends by itself"} if config.model.attn_impl != "auto" else {}),
    }
    for flag, fix in wrong.items():
        raise UsageError(f"llama.cpp isn't driven with {flag}", where=flag, fix=fix)
    return LlamaCppBackend(
        find_gguf(config.model),
        prepared.tokenizer,
        engine,
        stop_token_ids=prepared.stop_token_ids(),
        device=prepared.device,
        max_model_len=config.model.max_model_len,
    )


_MERGE = "merge it first (swift merge-lora), and make a GGUF file of the result"


def _has_dtype(prepared: Prepared) -> bool:
    return prepared.config.model.torch_dtype is not None


class LlamaCppBackend:
    """See `Backend`.

    Args:
        file: GGUF; of a model in several files, the first.
        tokenizer: of the model.
        config: settings of the engine.
        stop_token_ids: what ends an answer.
        device: layers go there; on a CPU, as many threads are used as torch has.
        max_model_len: a shorter context than the model's.

    Raises:
        ModelError: the file can't be run. UsageError: a context longer than the model's.
        DependencyError: llama-cpp-python isn't installed.
    """

    name = "llamacpp"

    def __init__(
        self,
        file: Path,
        tokenizer: Any,
        config: EngineConfig,
        *,
        stop_token_ids: Sequence[int],
        device: Device,
        max_model_len: int | None = None,
    ) -> None:
        if config.max_batch_size > MOST_SEQUENCES:
            raise UsageError(
                f"llama.cpp computes {MOST_SEQUENCES} requests together at most",
                where=f"--max_batch_size {config.max_batch_size}",
                fix=f"--max_batch_size {MOST_SEQUENCES}",
            )
        self._held = held = _Held(file, config, device)
        _check_fit(held.model, tokenizer, file, max_model_len)
        context = max_model_len or held.model.context_length
        tokens = held.make_cache_size(context)
        pool = BlockPool(tokens // config.block_size, config.block_size, caching=held.kept > 0)
        if tokens < context:
            log.info("the KV cache holds %d tokens, fewer than the model's context of %d", tokens, context)
            context = pool.num_blocks * config.block_size
        self._info = ModelInfo(
            context_length=context,
            vocab_size=held.model.vocab_size,
            stop_token_ids=tuple(stop_token_ids),
            features=frozenset(
                {"logprobs", "prompt_logprobs", "structure", "penalties", "logit_bias", "min_p", "sleep"}
            ),
            max_logprobs=_MOST_LOGPROBS,
        )
        limits = Limits(config.max_batch_size, config.max_batch_tokens)
        scheduler = Scheduler(pool, limits)
        self._chooser = Chooser(held.model.vocab_size, "cpu", tokenizer)
        self._runner = GgufRunner(
            lambda: scheduler.running,
            config.block_size,
            numbers=held.numbers,
            kept=held.kept,
        )
        self._core = EngineCore(
            Parts(
                runner=self._runner,
                scheduler=scheduler,
                chooser=self._chooser,
                adapters=AdapterSlots(torch.nn.Module()),  # none
                tokenizer=tokenizer,
                stop_token_ids=frozenset(stop_token_ids),
                context_length=context,
                pace=None if config.max_latency_ms is None else Pace(limits, config.max_latency_ms / 1000),
            )
        )
        self._pool = pool
        self._runner.forget = self._core.forget_texts
        self._runner.cache = held.make_cache()
        self._loop = EngineLoop(self._core)
        self._asleep = False
        # a thread inside of llama.cpp while the interpreter ends would crash it
        self._finalizer = weakref.finalize(self, _close, self._loop, held)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def start(self) -> None:
        self._loop.start()

    def close(self) -> None:
        self._finalizer()

    def submit(self, request: Request, sink: Sink) -> None:
        check_prompt(request.prompt, self._info)
        check_params(request.params, self._info)
        self._chooser.check(request.params)
        if request.adapter is not None:
            self._refuse("adapters by request", _MERGE)
        self._check_awake()
        self._loop.submit(request, sink, self._check_awake)

    def _check_awake(self) -> None:
        if self._asleep:
            raise UsageError("the engine sleeps", fix="wake() it first")

    def cancel(self, request_id: str) -> None:
        self._loop.cancel(request_id)

    def stats(self) -> EngineStats:
        scheduler = self._core.scheduler
        return replace(
            self._core.stats,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            blocks_used=self._pool.num_used,
            blocks_total=self._pool.num_blocks,
            asleep=self._asleep,
        )

    def load_adapter(self, name: str, folder: Path) -> None:
        self._refuse("adapters by request", _MERGE)

    def unload_adapter(self, name: str) -> None:
        self._refuse("adapters by request", _MERGE)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._refuse("weights that change: a GGUF file holds others than training has", "--infer_backend swift")

    def sleep(self, level: int = 1) -> None:
        if level != 1:
            self._refuse(f"sleep of level {level}: forgotten weights can't be given back", "sleep(1)")

        def fall_asleep() -> None:
            self._asleep = True
            self._core.forget_texts()
            self._runner.cache = None
            self._held.close()

        self._loop.call(fall_asleep, idle=True)

    def wake(self) -> None:
        def awake() -> None:
            if self._asleep:
                self._held.load()
                self._runner.cache = self._held.make_cache()
                self._asleep = False

        self._loop.call(awake)

    def _refuse(self, what: str, fix: str) -> NoReturn:
        raise UsageError(f"llama.cpp isn't driven with {what}", where="--infer_backend llamacpp", fix=fix)


class _Held:
    """What takes memory: the weights, and the cache once its size is known."""

    def __init__(self, file: Path, config: EngineConfig, device: Device) -> None:
        self._file = file
        self._config = config
        self._device = device
        self._dtype: CacheDtype = _USUAL_CACHE if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
        self._tokens = 0
        self._cache: GgufCache | None = None
        self.load()
        most = config.max_batch_size
        # what is left of llama.cpp's numbers when as many texts come as go
        caching = config.enable_prefix_caching and not self.model.recurrent
        self.kept = max(0, MOST_SEQUENCES - 2 * most) if caching else 0
        self.numbers = 2 * most + self.kept if self.kept else most

    def load(self) -> None:
        """Read the weights."""
        self.model = GgufModel(self._file, gpu=self._device.type != "cpu")

    def make_cache_size(self, context: int) -> int:
        """Tokens of the cache in the memory that it may have, but no more than all requests together can use."""
        config, size = self._config, self.model.token_bytes(self._dtype)
        if config.kv_cache_gib is not None:
            budget = int(config.kv_cache_gib * _GIB)
        else:
            free = free_memory_bytes(self._device)
            one = max(_USUAL_ON_CPU, size * context)
            budget = min(free // 4, _MOST_ON_CPU, one) if self._device.type == "cpu" else int(free * 0.8)
        self._tokens = min(budget // size, context * config.max_batch_size)
        if self._tokens < config.block_size:
            raise ModelError(
                f"a token of the KV cache takes {size} bytes, and {budget} are allowed",
                where="--kv_cache_gib",
                fix="allow more",
            )
        return self._tokens

    def make_cache(self) -> GgufCache:
        self._cache = GgufCache(
            self.model,
            self._tokens,
            sequences=self.numbers,
            rows=self._config.max_batch_tokens,
            dtype=self._dtype,
            threads=torch.get_num_threads(),
        )
        return self._cache

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._cache is not None:
            self._cache.close()
        self.model.close()


def _close(loop: EngineLoop, held: _Held) -> None:
    loop.close()
    held.close()


def _check_fit(model: GgufModel, tokenizer: Any, file: Path, max_model_len: int | None) -> None:
    if len(tokenizer) > model.vocab_size:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, and {file} {model.vocab_size}",
            where="--model",
            fix="put the tokenizer and config.json of the file's own model beside it, or none",
        )
    if max_model_len is not None and max_model_len > model.context_length:
        raise UsageError(
            f"the model has a context of {model.context_length}",
            where=f"--max_model_len {max_model_len}",
            fix=f"--max_model_len {model.context_length} at most",
        )
