"""LMDeploy as a backend: its own server in its own environment, asked in tokens by its `/generate`; see `served.py`.

Written after LMDeploy 0.18.0 and tested against its forms of answers; not yet run on a GPU, and it needs one.

Its `/generate` knows no seeds, forms, biases, presence and frequency penalties, least lengths or adapters, and its
weights are replaced by pickled handles of GPU memory only: all of that is refused by name. It stops at tokens alone, so
stop texts are found here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swift.core.errors import SwiftError, UsageError
from swift.core.logging import get_logger
from swift.inference.backends.base import Feature, ModelInfo
from swift.inference.backends.dialect import Call, Enough, Reader, end_tokens, most_tokens
from swift.inference.backends.own_text import OwnText
from swift.inference.backends.served import Launch, Project, served_backend
from swift.inference.requests import FinishReason, Request, SamplingParams, TokenLogprob, Update

if TYPE_CHECKING:
    from swift.inference.backends.http import HttpBackend
    from swift.inference.loading import Prepared

log = get_logger("inference")

_FEATURES: frozenset[Feature] = frozenset({"penalties", "min_p"})
_KEY = "SWIFT_LMDEPLOY_KEY"  # of the server's environment alone
# LMDeploy takes its key from the command line, which everyone can read: it is added within the process
_START = (
    "import os, sys; from lmdeploy.cli.entrypoint import run; "
    f"sys.argv = ['lmdeploy', *sys.argv[1:], '--api-keys', os.environ.pop({_KEY!r})]; run()"
)
_REASONS: Mapping[str, FinishReason] = {"length": "length", "abort": "cancelled", "stop": "stop"}


def lmdeploy_backend(prepared: Prepared) -> HttpBackend:
    """LMDeploy with the model that `prepared` describes; it isn't started yet.

    Raises:
        UsageError: settings that it isn't driven with. DependencyError: it isn't there.
    """
    if prepared.adapter is not None:
        raise UsageError(
            "LMDeploy's /generate runs no adapters",
            where="--adapters",
            fix="merge it first: swift merge-lora --adapters …",
        )
    if prepared.dtype == torch.float32:
        raise UsageError(
            "LMDeploy computes in float16 or bfloat16", where="--torch_dtype float32", fix="--torch_dtype bfloat16"
        )
    log.info("LMDeploy draws anew each time: its /generate takes no seed")
    return served_backend(lmdeploy_project(prepared), prepared)


def lmdeploy_project(prepared: Prepared) -> Project:
    """What is LMDeploy's own, for a model."""
    return Project(
        name="lmdeploy",
        title="LMDeploy",
        package="lmdeploy",
        dialect=LmdeployDialect(prepared.tokenizer, prepared.stop_token_ids()),
        features=_FEATURES,
        own_features=frozenset({"logprobs", "sleep"}),
        without=lambda prepared: frozenset({"sleep"} if prepared.device.type == "cpu" else ()),
        command=serve_command,
        secrets=lambda launch: {_KEY: launch.key},
    )


class LmdeployDialect:
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

        def read(chunk: dict[str, Any]) -> Iterator[Update]:
            if "output_ids" not in chunk:
                raise ValueError("it gives no token ids back")
            about = chunk["meta_info"]
            update = Update(request.id, tokens=list(chunk["output_ids"] or ()), num_prompt_tokens=len(request.prompt))
            if request.params.logprobs is not None:
                update.logprobs = _logprobs(about, request.params.logprobs)
            reason = (about.get("finish_reason") or {}).get("type")
            if reason is not None and reason not in _REASONS:
                raise SwiftError(f"LMDeploy ended the answer: {reason}")
            if text.take(update, last=reason is not None):
                yield update
                raise Enough
            update.finish_reason = None if reason is None else _REASONS[reason]
            if update.tokens or update.text or reason is not None:
                yield update

        return read

    def cancel(self, request: Request) -> Sequence[Call]:
        return ()  # a closed connection is enough

    def load_adapter(self, name: str, folder: Path) -> Sequence[Call]:
        raise SwiftError("LMDeploy's /generate runs no adapters")

    def unload_adapter(self, name: str) -> Sequence[Call]:
        raise SwiftError("LMDeploy's /generate runs no adapters")

    def update_weights(self, folder: Path) -> Sequence[Call]:
        raise SwiftError("LMDeploy takes no weights from files")

    def sleep(self, level: int) -> Sequence[Call]:
        if level == 2:
            raise UsageError("weights that LMDeploy forgets can't be given back", fix="sleep(1) keeps them")
        return (Call("/sleep", {}, {"level": str(level)}),)

    def wake(self, level: int) -> Sequence[Call]:
        return (Call("/wakeup", {}),)


def generate_body(request: Request, info: ModelInfo) -> dict[str, Any]:
    """The JSON of a request to `/generate`."""
    params, most = request.params, most_tokens(request, info)
    if most is None:
        raise UsageError(
            "LMDeploy has to be told how long an answer may be", where="max_new_tokens", fix="give a number"
        )
    body: dict[str, Any] = {
        "input_ids": request.prompt,
        "stream": True,
        "max_tokens": most,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": end_tokens(params, info),
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": False,  # the text is made here
        "include_stop_str_in_output": True,  # else the token that ends an answer isn't told
    }
    if params.logprobs is not None:
        body |= {"return_logprob": True, "top_logprobs_num": params.logprobs}
    return body


def _refuse_others(params: SamplingParams) -> None:
    wrong = {
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "min_new_tokens": params.min_new_tokens > 0,
        "temperature": params.temperature > 2,
    }
    for name in (name for name, asked in wrong.items() if asked):
        given = getattr(params, name)
        raise UsageError(
            f"LMDeploy's /generate can't be asked for {name} {given:g}", where=name, fix="--infer_backend swift or vllm"
        )


def _logprobs(about: Mapping[str, Any], wanted: int) -> list[TokenLogprob]:
    values = about.get("output_token_logprobs") or ()
    tops = about.get("output_top_logprobs") or [()] * len(values)
    return [
        TokenLogprob(token, value, tuple((each[1], each[0]) for each in top[:wanted]))
        for (value, token), top in zip(values, tops, strict=True)
    ]


def serve_command(launch: Launch) -> list[str]:
    """The words that start LMDeploy's server. Its PyTorch engine tells log-probabilities before temperature."""
    prepared, engine = launch.prepared, launch.prepared.config.engine
    words = [launch.python, "-c", _START, "serve", "api_server", str(prepared.base), "--backend", "pytorch"]
    words += ["--server-name", "127.0.0.1", "--server-port", str(launch.port), "--model-name", launch.model]
    words += ["--logprobs-mode", "raw_logprobs", "--max-batch-size", str(engine.max_batch_size)]
    words += ["--dtype", str(prepared.dtype).removeprefix("torch."), "--enable-prefix-caching"]
    if launch.info.context_length is not None:
        words += ["--session-len", str(launch.info.context_length)]
    if prepared.config.model.trust_remote_code:
        words += ["--trust-remote-code"]
    return words
