"""OpenVINO as a backend: a model in its format, run inside of this program by openvino-genai's continuous batching.

The model is a folder as optimum-intel writes it: `openvino_model.xml` and `.bin` beside the configuration and the
tokenizer. openvino-genai chooses the tokens; what it has no way to do, or does in another sense, is refused by name.
Its presence and frequency penalties are added to scores below zero. Its forms let special tokens stand for text, know
no bound for white space, and a wrong one ends all requests. Of log-probabilities it has the chosen token's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from transformers import AutoConfig

from swift.config.engine import EngineConfig
from swift.config.engine_checks import paged_settings
from swift.core.errors import ModelError, SwiftError, UsageError
from swift.core.logging import get_logger
from swift.inference.backends.base import EngineStats, Feature, ModelInfo
from swift.inference.backends.dialect import seed_number
from swift.inference.backends.own_text import OwnText
from swift.inference.backends.prompt import check_prompt
from swift.inference.choosing.checks import check_params
from swift.inference.paged.core import tell
from swift.inference.paged.loop import EngineLoop
from swift.inference.requests import Request, SamplingParams, Sink, TokenLogprob, Update
from swift.models.openvino import load_genai

if TYPE_CHECKING:
    from swift.inference.loading import Prepared

log = get_logger("inference")

_FEATURES: frozenset[Feature] = frozenset({"logprobs", "penalties", "min_p", "sleep"})
# settings of our engine that mean the same here
_SHARED = frozenset({"max_batch_tokens", "kv_cache_gib", "kv_cache_dtype", "enable_prefix_caching"})
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_BLOCK = 32  # tokens of a block, as openvino-genai has it on a CPU
_USUAL_GIB = 1.0
_FALLBACK_CONTEXT = 2048
# openvino-genai takes what is 0 in fp32 for a mistake, and 1 for min_p as well: values that choose the same
_LEAST, _MOST_MIN_P = 1e-30, 1 - 2**-24


def openvino_backend(prepared: Prepared) -> OpenvinoBackend:
    """OpenVINO with the model that `prepared` describes; it isn't started yet.

    Raises:
        UsageError: settings that mean nothing here. ModelError: the folder holds no such model.
        DependencyError: openvino-genai isn't installed.
    """
    config, engine = prepared.config, prepared.config.engine
    given = [name for name in paged_settings(engine) if name not in _SHARED]
    given += [name for name in ("engine_python", "engine_url") if getattr(engine, name)]
    wrong = {
        **{f"--{name}": "leave it out: OpenVINO runs inside of this program, without it" for name in given},
        **({"--adapters": "merge it first (swift merge-lora), and convert the result"} if prepared.adapter else {}),
        **({"--rope_scaling": "leave it out: the model's file says it"} if config.model.rope_scaling else {}),
        **({"--attn_impl": "leave it out: OpenVINO attends by itself"} if config.model.attn_impl != "auto" else {}),
        **({"--device": "--device cpu"} if prepared.device.type != "cpu" else {}),
    }
    for flag, fix in wrong.items():
        raise UsageError(f"OpenVINO isn't driven with {flag}", where=flag, fix=fix)
    folder = prepared.base
    text = AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config()
    kv_dtype = str(prepared.dtype).removeprefix("torch.") if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    properties = {
        "INFERENCE_PRECISION_HINT": _PRECISIONS[str(prepared.dtype).removeprefix("torch.")],
        "KV_CACHE_PRECISION": _PRECISIONS[kv_dtype],
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
        **_properties(engine.engine_args),
    }
    context = config.model.max_model_len or getattr(text, "max_position_embeddings", None) or _FALLBACK_CONTEXT
    blocks = _blocks(text, engine, getattr(torch, kv_dtype).itemsize)
    info = ModelInfo(
        context_length=min(context, blocks * _BLOCK),
        vocab_size=text.vocab_size,
        stop_token_ids=tuple(prepared.stop_token_ids()),
        features=_FEATURES,
        max_logprobs=0,
    )
    return OpenvinoBackend(folder, prepared.tokenizer, info, _Settings(blocks, engine, properties))


@dataclass(frozen=True)
class _Settings:
    """How a pipeline is made.

    Attributes:
        blocks: of the KV cache. properties: of OpenVINO's plug-in.
    """

    blocks: int
    engine: EngineConfig
    properties: dict[str, str]

    def pipeline(self, folder: Path) -> Any:
        """Read the model.

        Raises:
            ModelError: OpenVINO can't.
        """
        genai = load_genai()
        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = self.blocks
        scheduler.cache_size = 0
        scheduler.max_num_seqs = self.engine.max_batch_size
        scheduler.max_num_batched_tokens = self.engine.max_batch_tokens
        scheduler.enable_prefix_caching = self.engine.enable_prefix_caching
        scheduler.dynamic_split_fuse = True
        try:
            return genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", self.properties)
        except RuntimeError as error:
            said = " ".join(str(error).split())
            raise ModelError(
                f"OpenVINO can't run the model: {said[:500]}",
                where=str(folder),
                fix="it has to be a stateful text model, as optimum-cli export openvino makes it",
            ) from error


class OpenvinoBackend:
    """See `Backend`."""

    name = "openvino"

    def __init__(self, folder: Path, tokenizer: Any, info: ModelInfo, settings: _Settings) -> None:
        load_genai()
        self._info = info
        self._core = _Core(lambda: settings.pipeline(folder), tokenizer, info)
        self._loop = EngineLoop(self._core)
        self._asleep = False
        # a thread inside of the library while the interpreter ends would crash it
        self._finalizer = weakref.finalize(self, EngineLoop.close, self._loop)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def start(self) -> None:
        self._core.wake()
        self._loop.start()

    def close(self) -> None:
        self._finalizer()

    def submit(self, request: Request, sink: Sink) -> None:
        check_prompt(request.prompt, self._info)
        check_params(request.params, self._info)
        _check_penalties(request.params)
        if request.adapter is not None:
            self._refuse("adapters")
        self._check_awake()
        self._loop.submit(request, sink, self._check_awake)

    def cancel(self, request_id: str) -> None:
        self._loop.cancel(request_id)

    def stats(self) -> EngineStats:
        return replace(self._core.stats, num_running=self._core.num_open, asleep=self._asleep)

    def load_adapter(self, name: str, folder: Path) -> None:
        self._refuse("adapters")

    def unload_adapter(self, name: str) -> None:
        self._refuse("adapters")

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._refuse("weights that change: they are compiled into the model")

    def sleep(self, level: int = 1) -> None:
        def fall_asleep() -> None:
            self._asleep = True
            self._core.sleep()

        if level != 1:
            self._refuse(f"sleep of level {level}: its weights come from the model's file only")
        self._loop.call(fall_asleep, idle=True)

    def wake(self) -> None:
        def awake() -> None:
            if self._asleep:
                self._core.wake()
                self._asleep = False

        self._loop.call(awake)

    def _check_awake(self) -> None:
        if self._asleep:
            raise UsageError("the engine sleeps", fix="wake() it first")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"OpenVINO is not driven with {what}", where="--infer_backend openvino", fix="--infer_backend swift"
        )


@dataclass
class _Open:
    """An answer in the making."""

    request: Request
    sink: Sink
    handle: Any
    text: OwnText


class _Core:
    """What `EngineLoop` runs: the pipeline, step by step.

    Args:
        make: reads the model.
    """

    def __init__(self, make: Callable[[], Any], tokenizer: Any, info: ModelInfo) -> None:
        self._make = make
        self._tokenizer = tokenizer
        self._info = info
        self._pipeline: Any = None
        self._open: dict[str, _Open] = {}
        self._number = 0
        self._left = False  # somebody was cancelled, whose blocks the next step gives back
        self.stats = EngineStats()

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def has_work(self) -> bool:
        return bool(self._open) or self._left

    def has(self, request_id: str) -> bool:
        return request_id in self._open

    def wake(self) -> None:
        self._pipeline = self._make()

    def sleep(self) -> None:
        self._pipeline = None

    def add(self, request: Request, sink: Sink) -> None:
        import openvino

        if self.has(request.id):
            error = UsageError(f"there is a request called {request.id!r} already", fix="give each an id of its own")
            tell(sink, Update(request.id, finish_reason="error", error=error, num_prompt_tokens=len(request.prompt)))
            return
        self._number += 1
        prompt = openvino.Tensor(np.array([request.prompt], dtype=np.int64))
        try:
            handle = self._pipeline.add_request(self._number, prompt, _generation(request, self._info))
        except RuntimeError as error:
            said = SwiftError(f"OpenVINO refuses the request: {' '.join(str(error).split())[:500]}")
            tell(sink, Update(request.id, finish_reason="error", error=said, num_prompt_tokens=len(request.prompt)))
            return
        text = OwnText(request, self._tokenizer, self._info.stop_token_ids)
        self._open[request.id] = _Open(request, sink, handle, text)
        self.stats.prompt_tokens += len(request.prompt)

    def cancel(self, request_id: str) -> None:
        left = self._open.pop(request_id, None)
        if left is not None:
            self._let_go(left)
            last = Update(request_id, num_prompt_tokens=len(left.request.prompt))
            left.text.take(last, last=True)
            last.finish_reason = "cancelled"
            tell(left.sink, last)

    def end_all(self, error: SwiftError | None = None) -> None:
        for left in self._open.values():
            self._let_go(left)
            reason: Any = "cancelled" if error is None else "error"
            number = len(left.request.prompt)
            tell(left.sink, Update(left.request.id, finish_reason=reason, error=error, num_prompt_tokens=number))
        self._open.clear()
        self._left = False
        try:
            while error is None and self._pipeline is not None and self._pipeline.has_non_finished_requests():
                self._pipeline.step()  # it gives the blocks of those that were cancelled back
        except RuntimeError as failure:  # all were told already
            log.warning("OpenVINO failed at its end: %s", failure)
        self._pipeline = None

    def step(self) -> None:
        import openvino_genai as genai

        self._left = False
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            self.stats.steps += 1
        for one in list(self._open.values()):
            while one.request.id in self._open and one.handle.can_read():
                for output in one.handle.read().values():
                    self._take(one, output, genai.GenerationFinishReason)
            if one.request.id in self._open and one.handle.get_status() == genai.GenerationStatus.IGNORED:
                self._fail(one)

    def _take(self, one: _Open, output: Any, reasons: Any) -> None:
        """What a step brought to a request."""
        request = one.request
        update = Update(request.id, tokens=list(output.generated_ids), num_prompt_tokens=len(request.prompt))
        if request.params.logprobs is not None:
            pairs = zip(update.tokens, output.generated_log_probs, strict=True)
            update.logprobs = [TokenLogprob(token, logprob) for token, logprob in pairs]
        self.stats.generated_tokens += len(update.tokens)
        over = output.finish_reason != reasons.NONE
        ended = one.text.take(update, last=over)
        if over and not ended:
            update.finish_reason = "length" if output.finish_reason == reasons.LENGTH else "stop"
        if ended or over:
            del self._open[request.id]
            if not over:  # a stop text, which only we know
                self._let_go(one)
        tell(one.sink, update)

    def _fail(self, one: _Open) -> None:
        error = UsageError(
            "the KV cache is too small for this request", fix="a shorter prompt or answer, or more --kv_cache_gib"
        )
        del self._open[one.request.id]
        number = len(one.request.prompt)
        tell(one.sink, Update(one.request.id, finish_reason="error", error=error, num_prompt_tokens=number))

    def _let_go(self, one: _Open) -> None:
        one.handle.cancel()
        self._left = True


def _check_penalties(params: SamplingParams) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        if getattr(params, name) != 0:
            raise UsageError(
                f"{name} means something else to OpenVINO, which adds it to scores below zero",
                where=name,
                fix="leave it out, or --infer_backend swift",
            )


def _generation(request: Request, info: ModelInfo) -> Any:
    """A request's settings in openvino-genai's words."""
    import openvino_genai as genai

    params: SamplingParams = request.params
    config = genai.GenerationConfig()
    assert info.context_length is not None
    left = info.context_length - len(request.prompt)
    config.max_new_tokens = left if params.max_new_tokens is None else min(left, params.max_new_tokens)
    config.min_new_tokens = min(params.min_new_tokens, config.max_new_tokens)
    config.do_sample = params.temperature > 0
    if config.do_sample:
        config.rng_seed = seed_number(params)
        config.temperature, config.top_p = max(params.temperature, _LEAST), max(params.top_p, _LEAST)
        config.min_p = min(params.min_p, _MOST_MIN_P)
        config.top_k = params.top_k or info.vocab_size
    config.repetition_penalty = params.repetition_penalty
    config.logprobs = 0 if params.logprobs is None else 1
    config.stop_token_ids = {*(() if params.ignore_eos else info.stop_token_ids), *params.stop_token_ids}
    config.ignore_eos = params.ignore_eos
    return config


def _blocks(text: Any, engine: EngineConfig, itemsize: int) -> int:
    """Blocks that fit into the memory for keys and values."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    size = 2 * text.num_hidden_layers * heads * dim * itemsize * _BLOCK
    blocks = int((engine.kv_cache_gib or _USUAL_GIB) * (1 << 30)) // size
    if blocks < 1:
        raise ModelError(f"one block of the KV cache takes {size} bytes", where="--kv_cache_gib", fix="allow more")
    return blocks


def _properties(words: list[str]) -> dict[str, str]:
    """`KEY=VALUE` words as properties of OpenVINO's plug-in."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals):
            raise UsageError(
                f"{word!r} is no property",
                where="--engine_args",
                fix="for example --engine_args=PERFORMANCE_HINT=LATENCY",
            )
        found[name] = value
    return found
