"""OpenAI's completions with token ids, as vLLM and our own server speak them.

Only servers that give token ids back are driven (`return_token_ids`): ids guessed from text would not be the ones that
were generated.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swift.core.errors import SwiftError, UsageError
from swift.inference.backends.base import ModelInfo
from swift.inference.backends.dialect import Call, Reader, end_tokens, most_tokens, seed_number
from swift.inference.requests import Request, SamplingParams, TokenLogprob, Update

_ID = "token_id:"  # how tokens are named with `return_tokens_as_token_ids`


class Completions:
    """See `Dialect`. Adapters are models by name, loaded and unloaded as vLLM has it; weights stay as they are."""

    def question(self, request: Request, model: str, info: ModelInfo) -> Call:
        return Call("/v1/completions", completion_body(request, request.adapter or model, info))

    def reader(self, request: Request) -> Reader:
        def read(chunk: dict[str, Any]) -> Iterator[Update]:
            for choice in chunk.get("choices", ()):
                yield _update(request, choice)

        return read

    def cancel(self, request: Request) -> Sequence[Call]:
        return ()

    def load_adapter(self, name: str, folder: Path) -> Sequence[Call]:
        return (Call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder.resolve())}),)

    def unload_adapter(self, name: str) -> Sequence[Call]:
        return (Call("/v1/unload_lora_adapter", {"lora_name": name}),)

    def update_weights(self, folder: Path) -> Sequence[Call]:
        raise SwiftError("OpenAI's protocol has no weights")

    def sleep(self, level: int) -> Sequence[Call]:
        raise SwiftError("OpenAI's protocol has no sleep")

    def wake(self, level: int) -> Sequence[Call]:
        raise SwiftError("OpenAI's protocol has no sleep")


def completion_body(request: Request, model: str, info: ModelInfo) -> dict[str, Any]:
    """The JSON of a request to `/v1/completions`."""
    params = request.params
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt,
        "stream": params.prompt_logprobs is None,  # vLLM tells them in a whole answer only
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "max_tokens": most_tokens(request, info),
        "min_tokens": params.min_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "stop_token_ids": end_tokens(params, info),
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens,
        "seed": seed_number(params),
    }
    if params.logprobs is not None:
        body["logprobs"] = params.logprobs
    if params.prompt_logprobs is not None:
        body["prompt_logprobs"] = params.prompt_logprobs
    if params.logit_bias:
        body["logit_bias"] = {str(token): value for token, value in params.logit_bias}
    if params.structure is not None:
        body["structured_outputs"] = _structured(params)
    return {key: value for key, value in body.items() if value is not None}


def _structured(params: SamplingParams) -> dict[str, Any]:
    assert params.structure is not None
    kind, value = params.structure.kind, params.structure.value
    if kind == "json":
        return {"json_object": True}
    if kind == "json_schema":
        return {"json": json.loads(value)}
    if kind == "choice":
        return {"choice": json.loads(value)}
    if kind in ("regex", "grammar"):
        return {kind: value}
    raise UsageError("a call can't be forced over HTTP", where="tool_choice", fix="--infer_backend swift")


def _update(request: Request, choice: dict[str, Any]) -> Update:
    tokens = choice.get("token_ids")
    if tokens is None:
        raise ValueError("it gives no token ids back (return_token_ids)")
    reason = choice.get("finish_reason")
    update = Update(request.id, tokens=list(tokens), text=choice.get("text") or "")
    update.num_prompt_tokens = len(request.prompt)
    if request.params.logprobs is not None and choice.get("logprobs"):
        update.logprobs = _logprobs(choice["logprobs"], request.params.logprobs)
    if request.params.prompt_logprobs is not None and choice.get("prompt_logprobs"):
        update.prompt_logprobs = _prompt_logprobs(choice["prompt_logprobs"], request)
    if reason is not None:
        update.finish_reason = "length" if reason == "length" else "cancelled" if reason == "abort" else "stop"
        stopped = choice.get("stop_reason")
        ours = isinstance(stopped, str) or stopped in request.params.stop_token_ids
        update.stop_reason = stopped if ours else None
    return update


def _logprobs(found: dict[str, Any], wanted: int) -> list[TokenLogprob]:
    tops = found.get("top_logprobs") or [{}] * len(found["tokens"])
    entries = []
    for token, value, top in zip(found["tokens"], found["token_logprobs"], tops, strict=True):
        ranked = sorted(((_token(name), each) for name, each in (top or {}).items()), key=lambda pair: -pair[1])
        entries.append(TokenLogprob(_token(token), value, tuple(ranked[:wanted])))
    return entries


def _prompt_logprobs(found: list[dict[str, Any] | None], request: Request) -> list[TokenLogprob | None]:
    entries: list[TokenLogprob | None] = []
    for token, each in zip(request.prompt, found, strict=True):
        if each is None:
            entries.append(None)
            continue
        values = {int(name): entry["logprob"] for name, entry in each.items()}
        ranked = sorted(values.items(), key=lambda pair: -pair[1])
        entries.append(TokenLogprob(token, values[token], tuple(ranked[: request.params.prompt_logprobs])))
    return entries


def _token(name: str) -> int:
    if not name.startswith(_ID):
        raise ValueError("it names tokens by text (return_tokens_as_token_ids)")
    return int(name.removeprefix(_ID))
