"""SGLang as a backend: its own server in its own environment, asked in tokens by its `/generate`; see `served.py`.

Written after SGLang 0.5.23 and tested against its forms of answers; not yet run on a GPU, and it needs one.

What its settings don't mean as ours do is refused by name: its repetition penalty leaves the prompt out, and its
log-probabilities are taken after penalties and forms. Draws repeat by seed only in a server that was started with
`--enable-deterministic-inference`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.core.errors import UsageError
from swift.core.logging import get_logger
from swift.inference.backends.base import Feature, ModelInfo
from swift.inference.backends.dialect import Call, Reader, end_tokens, most_tokens, seed_number
from swift.inference.backends.own_text import OwnText
from swift.inference.backends.served import Launch, Project, most_lora_rank, served_backend
from swift.inference.requests import FinishReason, Request, SamplingParams, TokenLogprob, Update

if TYPE_CHECKING:
    from swift.inference.backends.http import HttpBackend
    from swift.inference.loading import Prepared

log = get_logger("inference")

_FEATURES: frozenset[Feature] = frozenset({"structure", "penalties", "logit_bias", "min_p"})
# log-probabilities before temperature are asked for by a variable of the server's
_OWN_FEATURES: frozenset[Feature] = frozenset({"logprobs", "prompt_logprobs", "adapters", "weight_update", "sleep"})
_DETERMINISTIC = "--enable-deterministic-inference"


def sglang_backend(prepared: Prepared) -> HttpBackend:
    """SGLang with the model that `prepared` describes; it isn't started yet.

    Raises:
        UsageError: settings that it isn't driven with. DependencyError: it isn't there.
    """
    return served_backend(sglang_project(prepared), prepared)


def sglang_project(prepared: Prepared) -> Project:
    """What is SGLang's own, for a model."""
    return Project(
        name="sglang",
        title="SGLang",
        package="sglang",
        dialect=SglangDialect(prepared.tokenizer, prepared.stop_token_ids()),
        features=_FEATURES,
        own_features=_OWN_FEATURES,
        without=_without,
        command=serve_command,
        environment=lambda launch: {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"},
    )


class SglangDialect:
    """See `Dialect`.

    Args:
        tokenizer: of the model.
        stop_token_ids: what ends an answer unless a request says otherwise.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = stop_token_ids

    def question(self, request: Request, model: str, info: ModelInfo) -> Call:
        _refuse_others(request.params)
        return Call("/generate", generate_body(request, info))

    def reader(self, request: Request) -> Reader:
        text = OwnText(request, self._tokenizer, self._stops)
        seen = 0

        def read(chunk: dict[str, Any]) -> Iterator[Update]:
            nonlocal seen
            if "output_ids" not in chunk:
                raise ValueError("it gives no token ids back")
            about = chunk["meta_info"]
            # pieces of the answer, or, as it was started, all of it so far
            count = int(about["completion_tokens"]) - seen
            update = Update(request.id, num_prompt_tokens=len(request.prompt))
            update.tokens = chunk["output_ids"][-count:] if count > 0 else []
            update.num_cached_tokens = int(about.get("cached_tokens") or 0)
            if request.params.logprobs is not None:
                update.logprobs = _logprobs(about, count, request.params.logprobs)
            if request.params.prompt_logprobs is not None and not seen:
                update.prompt_logprobs = _prompt_logprobs(about, request.params.prompt_logprobs)
            seen += max(0, count)
            reason = (about.get("finish_reason") or {}).get("type")
            if not text.take(update, last=reason is not None) and reason is not None:
                update.finish_reason = _REASONS.get(reason, "stop")
            if update.tokens or update.text or update.finish_reason is not None:
                yield update

        return read

    def cancel(self, request: Request) -> Sequence[Call]:
        return (Call("/abort_request", {"rid": request.id}),)

    def load_adapter(self, name: str, folder: Path) -> Sequence[Call]:
        return (Call("/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}),)

    def unload_adapter(self, name: str) -> Sequence[Call]:
        return (Call("/unload_lora_adapter", {"lora_name": name}),)

    def update_weights(self, folder: Path) -> Sequence[Call]:
        return (Call("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True}),)

    def sleep(self, level: int) -> Sequence[Call]:
        return (Call("/release_memory_occupation", {}),)  # whether a copy stays in main memory is said at the start

    def wake(self, level: int) -> Sequence[Call]:
        return (Call("/resume_memory_occupation", {}),)


_REASONS: Mapping[str, FinishReason] = {"length": "length", "abort": "cancelled"}


def generate_body(request: Request, info: ModelInfo) -> dict[str, Any]:
    """The JSON of a request to `/generate`."""
    params = request.params
    sampling: dict[str, Any] = {
        "max_new_tokens": most_tokens(request, info),
        "min_new_tokens": params.min_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop) or None,
        "stop_token_ids": end_tokens(params, info) or None,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens,
        "sampling_seed": seed_number(params),
        **_structured(params),
    }
    if params.logit_bias:
        sampling["logit_bias"] = {str(token): value for token, value in params.logit_bias}
    body: dict[str, Any] = {
        "rid": request.id,
        "input_ids": request.prompt,
        "sampling_params": {key: value for key, value in sampling.items() if value is not None},
        "stream": True,
    }
    if request.adapter is not None:
        body["lora_path"] = request.adapter
    if params.logprobs is not None or params.prompt_logprobs is not None:
        body["return_logprob"] = True
        body["logprob_start_len"] = -1 if params.prompt_logprobs is None else 0
        body["top_logprobs_num"] = max(params.logprobs or 0, params.prompt_logprobs or 0)
    return body


def _structured(params: SamplingParams) -> dict[str, str]:
    if params.structure is None:
        return {}
    kind, value = params.structure.kind, params.structure.value
    if kind == "json":
        return {"json_schema": '{"type": "object"}'}
    if kind == "json_schema":
        return {"json_schema": value}
    if kind == "regex":
        return {"regex": value}
    if kind == "grammar":
        return {"ebnf": value}
    if kind == "choice":
        return {"regex": "|".join(f"({re.escape(each)})" for each in json.loads(value))}
    return {"structural_tag": value}


def _refuse_others(params: SamplingParams) -> None:
    changed = params.structure is not None or params.logit_bias or params.presence_penalty or params.frequency_penalty
    if params.repetition_penalty != 1:
        message, where = "SGLang's repetition penalty leaves the prompt out, and ours counts it", "repetition_penalty"
    elif changed and params.logprobs is not None:
        message, where = "SGLang takes log-probabilities after penalties, biases and forms", "logprobs"
    else:
        return
    raise UsageError(message, where=where, fix="leave it out, or --infer_backend swift")


def _logprobs(about: Mapping[str, Any], count: int, wanted: int) -> list[TokenLogprob]:
    """Of the last `count` tokens."""
    if count <= 0:
        return []
    values = about["output_token_logprobs"][-count:]
    tops = (about.get("output_top_logprobs") or [None] * count)[-count:]
    return [_entry(value, top, wanted) for value, top in zip(values, tops, strict=True)]


def _prompt_logprobs(about: Mapping[str, Any], wanted: int) -> list[TokenLogprob | None]:
    values = about["input_token_logprobs"]
    tops = about.get("input_top_logprobs") or [None] * len(values)
    entries: list[TokenLogprob | None] = [
        None if value[0] is None else _entry(value, top, wanted) for value, top in zip(values, tops, strict=True)
    ]
    return entries


def _entry(value: Sequence[Any], top: Sequence[Sequence[Any]] | None, wanted: int) -> TokenLogprob:
    """From [log-probability, id, text]."""
    ranked = tuple((int(each[1]), float(each[0])) for each in (top or ())[:wanted])
    return TokenLogprob(int(value[1]), float(value[0]), ranked)


def serve_command(launch: Launch) -> list[str]:
    """The words that start SGLang's server. The key is in a file: command lines can be read by everyone."""
    prepared, engine = launch.prepared, launch.prepared.config.engine
    settings = launch.folder / "server.yaml"
    settings.write_text(f"api-key: {launch.key}\n")
    settings.chmod(0o600)
    words = [launch.python, "-m", "sglang.launch_server", "--config", str(settings)]
    words += ["--model-path", str(prepared.base), "--served-model-name", launch.model]
    words += ["--host", "127.0.0.1", "--port", str(launch.port), "--incremental-streaming-output"]
    words += ["--dtype", str(prepared.dtype).removeprefix("torch.")]
    words += ["--max-running-requests", str(engine.max_batch_size)]
    if launch.info.context_length is not None:
        words += ["--context-length", str(launch.info.context_length)]
    if prepared.config.model.trust_remote_code:
        words += ["--trust-remote-code"]
    if prepared.device.type == "cpu":
        words += ["--device", "cpu"]
    if "sleep" in launch.info.features:
        words += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    if "adapters" in launch.info.features:
        words += ["--enable-lora", "--max-lora-rank", str(most_lora_rank(prepared)), "--lora-target-modules", "all"]
    if _DETERMINISTIC not in engine.engine_args:
        log.info("SGLang draws anew each time: seeds count only with --engine_args=%s", _DETERMINISTIC)
    return words


def _without(prepared: Prepared) -> frozenset[Feature]:
    """Memory is given back on GPUs only; room for adapters costs memory and speed."""
    adapters = prepared.adapter is not None or prepared.config.engine.enable_lora
    awake: frozenset[Feature] = frozenset({"sleep"} if prepared.device.type == "cpu" else ())
    return awake | (frozenset() if adapters else frozenset({"adapters"}))
