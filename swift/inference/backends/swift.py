"""The program's own engine as a backend: a Hugging Face model, unmodified, over a paged KV cache.

Puts the engine's parts together and passes orders to its thread. What a request may ask for is checked here, in the
caller's thread, so that the engine meets only what it can do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from swift.config.engine import EngineConfig
from swift.core.devices import detect_device
from swift.core.errors import ModelError, UsageError
from swift.core.logging import get_logger
from swift.data.compiled import has_numba
from swift.inference.backends.base import EngineStats, Feature, ModelInfo
from swift.inference.backends.prompt import check_prompt
from swift.inference.choosing.checks import check_params
from swift.inference.choosing.chooser import Chooser
from swift.inference.paged.adapters import AdapterSlots
from swift.inference.paged.attention import PAGED
from swift.inference.paged.blocks import BlockPool
from swift.inference.paged.cache import KVCache
from swift.inference.paged.core import EngineCore, Parts
from swift.inference.paged.fit import layer_shapes, paged_unsupported_reason, prove_paged
from swift.inference.paged.guess import Guesser, LookupGuesser, ModelGuesser
from swift.inference.paged.linear import serve_linears
from swift.inference.paged.loop import EngineLoop
from swift.inference.paged.pace import Pace
from swift.inference.paged.runner import ModelRunner
from swift.inference.paged.scheduler import Limits, Scheduler
from swift.inference.paged.spread import Crew, SpreadRunner
from swift.inference.paged.weights import ServedWeights
from swift.inference.requests import Request, Sink
from swift.models.memory import free_memory_bytes

log = get_logger("inference")

_GIB = 1 << 30
_MOST_ON_CPU = 4 * _GIB
_MOST_LOGPROBS = 1000  # likeliest tokens that a request may ask for
_FALLBACK_CONTEXT = 1 << 20
# what a model over several processes can't do
_NOT_SPREAD: frozenset[Feature] = frozenset({"adapters", "weight_update", "sleep"})


class SwiftBackend:
    """See `Backend`.

    Args:
        model: a causal language model of transformers, in evaluation mode. It is the engine's from now on: its linear
            layers and its attention are exchanged.
        tokenizer: of the model.
        config: settings of the engine.
        stop_token_ids: what ends an answer.
        owned: nobody else needs the model's weights as they were; they are then held in the engine's form only.
        draft_model: a smaller model that guesses tokens.
        crew: the processes that the model is spread over; the first one is started, the others `follow`.

    Raises:
        ModelError: the model can't be run this way, or no block of the cache fits into memory.
    """

    name = "swift"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: EngineConfig,
        *,
        stop_token_ids: Sequence[int],
        owned: bool = True,
        draft_model: Any = None,
        crew: Crew | None = None,
    ) -> None:
        self._config = config
        self._crew = crew
        self._served = [_Served(part, config, owned, crew) for part in (model, draft_model) if part is not None]
        if draft_model is not None:
            _check_draft(model, draft_model)
        context = _context_length(model)
        self._num_blocks = _blocks_that_fit(self._served, config, context)
        if crew is not None:
            self._num_blocks = crew.least(self._num_blocks)
        for served in self._served:
            served.make_cache(self._num_blocks)
        self._runner = self._served[0].runner
        pool = self._new_pool()
        self._pool = pool
        device = self._served[0].device
        self._adapters = AdapterSlots(model)
        self._weights = ServedWeights(model)
        capacity = self._num_blocks * config.block_size
        if capacity < context:
            log.info("the KV cache holds %d tokens, fewer than the model's context of %d", capacity, context)
        context = min(context, capacity)
        vocab_size = model.get_input_embeddings().weight.shape[0]
        self._info = ModelInfo(
            context_length=context,
            vocab_size=vocab_size,
            stop_token_ids=tuple(stop_token_ids),
            features=frozenset(get_args(Feature)) - (_NOT_SPREAD if crew is not None else frozenset()),
            max_logprobs=_MOST_LOGPROBS,
        )
        self._chooser = Chooser(vocab_size, device, tokenizer)
        limits = Limits(config.max_batch_size, config.max_batch_tokens)
        self._core = EngineCore(
            Parts(
                runner=self._runner,
                scheduler=Scheduler(pool, limits),
                chooser=self._chooser,
                adapters=self._adapters,
                tokenizer=tokenizer,
                stop_token_ids=frozenset(stop_token_ids),
                context_length=context,
                guesser=self._guesser(),
                pace=None if config.max_latency_ms is None else Pace(limits, config.max_latency_ms / 1000),
            )
        )
        if device.type == "cpu" and not has_numba():
            log.info('numba is not installed, so attention is slower: pip install "swift-llm[serve]"')
        self._loop = EngineLoop(self._core)
        self._asleep = False
        # a thread inside of torch while the interpreter ends would crash it
        self._finalizer = weakref.finalize(self, _close, self._loop, self._runner)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def start(self) -> None:
        self._prove()
        self._loop.start()

    def follow(self) -> None:
        """Do what the first process of the crew says, until it is closed."""
        self._prove()
        runner = self._served[0].runner
        assert isinstance(runner, SpreadRunner)
        runner.follow()

    def _prove(self) -> None:
        for served in self._served:
            prove_paged(served.model, served.shapes)

    def close(self) -> None:
        self._finalizer()

    def submit(self, request: Request, sink: Sink) -> None:
        check_prompt(request.prompt, self._info)
        check_params(request.params, self._info)
        self._chooser.check(request.params)
        if request.adapter is not None:
            self._adapters.slot(request.adapter)
        if request.params.num_beams > self._config.max_batch_size:
            raise UsageError(
                f"{request.params.num_beams} beams are more than are computed together",
                where="num_beams",
                fix=f"{self._config.max_batch_size} or fewer, or a larger --max_batch_size",
            )
        self._check_awake()
        self._loop.submit(request, sink, self._check_awake)

    def _check_awake(self) -> None:
        if self._asleep:
            raise UsageError("the engine sleeps", fix="wake() it first")
        if self._weights.missing:
            raise UsageError(
                f"{len(self._weights.missing)} weights were let go of and not given back",
                fix="update_weights() with all of them",
            )

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
            adapters=list(self._adapters.names),
            asleep=self._asleep,
        )

    def _require(self, feature: Feature) -> None:
        if feature not in self._info.features:
            raise UsageError(
                f"a model that is spread over processes has no {feature}",
                where="--tensor_parallel_size",
                fix="--tensor_parallel_size 1",
            )

    def load_adapter(self, name: str, folder: Path) -> None:
        self._require("adapters")
        self._loop.call(lambda: self._adapters.load(name, folder))

    def unload_adapter(self, name: str) -> None:
        def unload() -> None:
            slot = self._adapters.slot(name)
            self._adapters.unload(name)
            self._core.forget_texts([slot])

        self._loop.call(unload, idle=True)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._require("weight_update")

        def update() -> None:
            self._weights.update(tensors)
            self._core.forget_texts()

        self._loop.call(update, idle=True)

    def sleep(self, level: int = 1) -> None:
        self._require("sleep")

        def fall_asleep() -> None:
            self._asleep = True
            self._core.forget_texts()
            for served in self._served:
                served.drop_cache()
            self._weights.sleep(level)

        if level not in (1, 2):
            raise UsageError(f"there is no sleep of level {level}", fix="1 keeps the weights, 2 forgets them")
        self._loop.call(fall_asleep, idle=True)

    def wake(self) -> None:
        def awake() -> None:
            if not self._asleep:
                return
            for served in self._served:
                served.make_cache(self._num_blocks)
            self._asleep = False

        self._loop.call(awake)

    def _new_pool(self) -> BlockPool:
        return BlockPool(self._num_blocks, self._config.block_size, caching=self._config.enable_prefix_caching)

    def _guesser(self) -> Guesser | None:
        config = self._config
        if len(self._served) == 2:
            pool = BlockPool(self._num_blocks, config.block_size, caching=False)
            return ModelGuesser(self._served[1].runner, pool, config.num_draft_tokens, config.max_batch_tokens)
        return LookupGuesser(config.num_draft_tokens) if config.speculative == "prompt_lookup" else None


def _close(loop: EngineLoop, runner: ModelRunner) -> None:
    """End the engine's thread, and let those who follow go."""
    loop.close()
    if isinstance(runner, SpreadRunner) and runner.leads:
        runner.stop()


class _Served:
    """A model made ready for the engine, and its cache.

    Raises:
        ModelError: the engine can't run it.
    """

    def __init__(self, model: Any, config: EngineConfig, owned: bool, crew: Crew | None) -> None:
        reason = paged_unsupported_reason(model)
        if reason is not None:
            raise ModelError(
                f"the engine can't run {type(model).__name__}: {reason}",
                where="--infer_backend swift",
                fix="--infer_backend transformers",
            )
        self.model = model.eval()
        self.device: torch.device = model.get_input_embeddings().weight.device
        self._block_size = config.block_size
        self.shapes = layer_shapes(model)
        self._dtype = model.dtype if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype)
        if crew is None:
            serve_linears(model, weight_format=config.weight_format, owned=owned)
        model.set_attn_implementation(PAGED)
        self.runner = ModelRunner(model) if crew is None else SpreadRunner(model, crew)

    @property
    def block_bytes(self) -> int:
        return KVCache.block_bytes(self.shapes, self._block_size, self._dtype)

    def make_cache(self, num_blocks: int) -> None:
        self.runner.cache = KVCache(self.shapes, num_blocks, self._block_size, self._dtype, self.device)

    def drop_cache(self) -> None:
        self.runner.cache = None


def _blocks_that_fit(served: list[_Served], config: EngineConfig, context: int) -> int:
    """Blocks in the memory that the caches may have, but no more than all requests together can use."""
    device = served[0].device
    if config.kv_cache_gib is not None:
        budget = int(config.kv_cache_gib * _GIB)
    else:
        free = free_memory_bytes(detect_device(device.index or 0, device.type))
        # the rest of an accelerator is for what a step computes; on a CPU others want memory as well
        budget = min(free // 4, _MOST_ON_CPU) if device.type == "cpu" else int(free * 0.8)
    size = sum(part.block_bytes for part in served)
    blocks = min(budget // size, -(-context // config.block_size) * config.max_batch_size)
    if blocks < 1:
        raise ModelError(
            f"one block of the KV cache takes {size} bytes, and {budget} are allowed",
            where="--kv_cache_gib",
            fix="allow more, or make --block_size smaller",
        )
    return int(blocks)


def _check_draft(model: Any, draft_model: Any) -> None:
    """The smaller model guesses tokens of the larger one's vocabulary."""
    wanted, given = (part.get_input_embeddings().weight.shape[0] for part in (model, draft_model))
    if wanted != given:
        raise UsageError(
            f"the draft model has {given} tokens, the model {wanted}",
            where="--draft_model",
            fix="take a smaller model of the same family",
        )


def _context_length(model: Any) -> int:
    text_config = model.config.get_text_config(decoder=True)
    return getattr(text_config, "max_position_embeddings", None) or _FALLBACK_CONTEXT
