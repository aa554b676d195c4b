"""Whether a request's settings are possible at all, and whether the backend can do what they ask for.

Servers and engines both ask here, so that a setting is refused with the same words everywhere. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from swift.core.errors import UsageError
from swift.inference.backends.base import Feature, ModelInfo
from swift.inference.requests import SamplingParams

MAX_BIAS = 100.0  # as much as OpenAI's API takes; it bans or forces a token
MAX_BEAMS = 64  # each has its own keys and values

_Check = tuple[str, Callable[[Any], bool], str]

_INTEGERS: tuple[_Check, ...] = (
    ("max_new_tokens", lambda v: v >= 1, "at least 1"),
    ("min_new_tokens", lambda v: v >= 0, "0 or above"),
    ("top_k", lambda v: v >= 0, "1 or above; 0 switches it off"),
    ("logprobs", lambda v: v >= 0, "0 or above"),
    ("prompt_logprobs", lambda v: v >= 0, "0 or above"),
    ("num_beams", lambda v: 1 <= v <= MAX_BEAMS, f"from 1 to {MAX_BEAMS}"),
)
_NUMBERS: tuple[_Check, ...] = (
    ("temperature", lambda v: v >= 0, "0 (greedy) or above"),
    ("top_p", lambda v: 0 < v <= 1, "above 0 and at most 1"),
    ("min_p", lambda v: 0 <= v <= 1, "from 0 to 1"),
    ("repetition_penalty", lambda v: 0.01 <= v <= 100, "from 0.01 to 100; 1 switches it off"),
    ("presence_penalty", lambda v: -2 <= v <= 2, "from -2 to 2"),
    ("frequency_penalty", lambda v: -2 <= v <= 2, "from -2 to 2"),
    ("length_penalty", lambda v: -10 <= v <= 10, "from -10 to 10"),
)


def check_params(params: SamplingParams, info: ModelInfo) -> None:
    """Refuse what can't be done.

    Args:
        params: of a request.
        info: of the model that shall answer it.

    Raises:
        UsageError: a value is out of its range, contradicts another one, or asks for something that the backend
            doesn't offer. `where` is the parameter's name.
    """
    _check_values(params)
    _check_tokens(params, info)
    _check_features(params, info)
    _check_beams(params)


def _check_values(params: SamplingParams) -> None:
    for name, valid, wanted in _INTEGERS:
        value = getattr(params, name)
        if value is None and name in ("max_new_tokens", "logprobs", "prompt_logprobs"):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not valid(value):
            _refuse(name, value, f"give a whole number, {wanted}")
    for name, valid, wanted in _NUMBERS:
        value = getattr(params, name)
        if not _is_number(value) or not valid(value):
            _refuse(name, value, f"give a value {wanted}")
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        raise UsageError(
            f"min_new_tokens {params.min_new_tokens} is more than max_new_tokens {params.max_new_tokens}",
            where="min_new_tokens",
            fix="give less",
        )
    for text in params.stop:
        if not isinstance(text, str) or not text:
            _refuse("stop", repr(text), "give texts of at least one character")


def _check_tokens(params: SamplingParams, info: ModelInfo) -> None:
    for token, bias in params.logit_bias:
        _check_token("logit_bias", token, info)
        if not _is_number(bias) or abs(bias) > MAX_BIAS:
            raise UsageError(
                f"logit_bias {bias} of token {token} is not possible",
                where="logit_bias",
                fix=f"give a value from {-MAX_BIAS:.0f} to {MAX_BIAS:.0f}",
            )
    for token in params.stop_token_ids:
        _check_token("stop_token_ids", token, info)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value > info.max_logprobs:
            raise UsageError(
                f"{name} {value} is not possible: {info.max_logprobs} at most",
                where=name,
                fix=f"give {info.max_logprobs} or less",
            )


def _check_features(params: SamplingParams, info: ModelInfo) -> None:
    wanted: list[tuple[bool, Feature, str]] = [
        (params.logprobs is not None, "logprobs", "logprobs"),
        (params.prompt_logprobs is not None, "prompt_logprobs", "prompt_logprobs"),
        (params.structure is not None, "structure", "structure"),
        (params.num_beams > 1, "beams", "num_beams"),
        (params.repetition_penalty != 1, "penalties", "repetition_penalty"),
        (params.presence_penalty != 0, "penalties", "presence_penalty"),
        (params.frequency_penalty != 0, "penalties", "frequency_penalty"),
        (bool(params.logit_bias), "logit_bias", "logit_bias"),
        (params.min_p > 0, "min_p", "min_p"),
    ]
    for asked, feature, name in wanted:
        if asked and feature not in info.features:
            raise UsageError(
                f"{name} is not possible: what runs this model doesn't offer it",
                where=name,
                fix="leave it out, or choose another --infer_backend",
            )


def _check_beams(params: SamplingParams) -> None:
    if params.num_beams == 1:
        return
    clashes = [
        ("temperature", params.temperature > 0),
        ("structure", params.structure is not None),
        ("logprobs", params.logprobs is not None),
        ("prompt_logprobs", params.prompt_logprobs is not None),
        ("stop", bool(params.stop)),
    ]
    for name, given in clashes:
        if given:
            raise UsageError(
                f"num_beams {params.num_beams} and {name} don't go together",
                where="num_beams",
                fix=f"leave out num_beams or {name}",
            )


def _check_token(name: str, token: Any, info: ModelInfo) -> None:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < info.vocab_size:
        raise UsageError(
            f"{name} names the token id {token}, which is not possible: the model has {info.vocab_size} tokens",
            where=name,
            fix=f"give ids from 0 to {info.vocab_size - 1}",
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse(name: str, value: Any, fix: str) -> None:
    raise UsageError(f"{name} {value} is not possible", where=name, fix=fix)
