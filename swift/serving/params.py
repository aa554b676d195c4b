"""From a request's fields to sampling parameters: defaults filled in, forms of the text chosen, limits checked."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import orjson

from swift.inference.requests import SamplingParams, Structure
from swift.serving.errors import ApiError
from swift.serving.schema import ResponseFormat, Sampling, refuse
from swift.serving.served import Talker

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {"include_stop_str_in_output": (False,)}
_SMALLEST_TOP_P = 1e-9  # 0 leaves the likeliest token, as 1e-9 does


def sampling_params(
    body: Sampling, talker: Talker, *, structure: Structure | None, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """How the answers of a request are generated. The seed is filled in by `seeds`.

    Args:
        structure: what the text has to look like, if anything.
        max_tokens: None for the default.
        logprobs: as in `SamplingParams`.

    Raises:
        ApiError: 400, values that don't go together.
    """
    refuse(body, _UNSUPPORTED)
    given = talker.defaults
    temperature = given.temperature if body.temperature is None else body.temperature
    top_p = given.top_p if body.top_p is None else max(body.top_p, _SMALLEST_TOP_P)
    top_k = given.top_k if body.top_k is None else max(body.top_k, 0)  # vLLM's -1 is "off"
    limit = given.max_new_tokens if max_tokens is None else max_tokens
    num_beams = 1
    if body.use_beam_search:
        num_beams, temperature = max(body.n or 1, 2), 0.0
        if (body.n or 1) > 1:
            raise ApiError(400, "beam search gives one answer here", param="n")
    if body.min_tokens and limit is not None and body.min_tokens > limit:
        raise ApiError(400, f"min_tokens is {body.min_tokens}, and max_tokens {limit}", param="min_tokens")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    return replace(
        given,
        max_new_tokens=limit,
        min_new_tokens=body.min_tokens or 0,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=given.min_p if body.min_p is None else body.min_p,
        repetition_penalty=given.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=given.presence_penalty if body.presence_penalty is None else body.presence_penalty,
        frequency_penalty=given.frequency_penalty if body.frequency_penalty is None else body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias, talker.backend.info.vocab_size),
        stop=given.stop if stop is None else tuple(stop),
        stop_token_ids=given.stop_token_ids if body.stop_token_ids is None else tuple(body.stop_token_ids),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
        structure=structure,
        num_beams=num_beams,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
    )


def seeds(params: SamplingParams, seed: int | None, count: int) -> list[SamplingParams]:
    """`count` variants of the parameters: each with draws of its own, the same ones for the same seed."""
    base = secrets.token_hex(8) if seed is None else str(seed)
    return [replace(params, seed=f"{base}/{index}") for index in range(count)]


def check_logprobs(count: int | None, most: int, param: str) -> None:
    """Refuse more likely tokens than the server gives."""
    if count is not None and count > most:
        raise ApiError(400, f"{param} is {count}, and {most} at most are given", param=param)


def check_context(num_tokens: int, max_tokens: int | None, context: int | None, param: str) -> None:
    """Refuse what the model's context can't hold.

    Args:
        num_tokens: of the prompt.
        max_tokens: that were asked for; None: what is left.
    """
    if num_tokens == 0:
        raise ApiError(400, "the prompt has no tokens", param=param)
    if context is None:
        return
    wanted = num_tokens + max(1, max_tokens or 1)
    if wanted > context:
        detail = f"{num_tokens} of the prompt" + (f" and {max_tokens} for the answer" if max_tokens else "")
        raise ApiError(
            400,
            f"the model's context is {context} tokens, and {wanted} are needed: {detail}"
            + ("" if max_tokens else ", which leaves none for an answer"),
            param=param,
            code="context_length_exceeded",
        )


def structure_of(body: Sampling, response_format: ResponseFormat | None = None) -> Structure | None:
    """What the text has to look like: from response_format, structured_outputs or one of the guided_ fields.

    Raises:
        ApiError: 400, several of them.
    """
    found: list[tuple[str, Structure]] = []
    if response_format is not None and response_format.type == "json_object":
        found.append(("response_format", Structure("json")))
    if response_format is not None and response_format.type == "json_schema":
        assert response_format.json_schema is not None
        schema = response_format.json_schema.schema_
        found.append(("response_format", Structure("json_schema", _text(schema))))
    asked = body.structured_outputs
    for name, value, kind in (
        ("guided_json", body.guided_json, "json_schema"),
        ("guided_regex", body.guided_regex, "regex"),
        ("guided_grammar", body.guided_grammar, "grammar"),
        ("guided_choice", body.guided_choice, "choice"),
        ("structured_outputs.json", asked and asked.json_, "json_schema"),
        ("structured_outputs.json_object", asked and asked.json_object, "json"),
        ("structured_outputs.regex", asked and asked.regex, "regex"),
        ("structured_outputs.grammar", asked and asked.grammar, "grammar"),
        ("structured_outputs.choice", asked and asked.choice, "choice"),
    ):
        if value is not None and value is not False:
            found.append((name, Structure(kind, "" if value is True else _text(value))))  # type: ignore[arg-type]
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise ApiError(400, f"an answer can have one form, and {names} were given", param=found[1][0])
    return found[0][1] if found else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _logit_bias(given: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for name, value in (given or {}).items():
        if not name.isascii() or not name.isdigit() or int(name) >= vocab_size:
            raise ApiError(
                400, f"logit_bias has {name!r:.50}: keys are token ids from 0 to {vocab_size - 1}", param="logit_bias"
            )
        pairs.append((int(name), value))
    return tuple(pairs)
