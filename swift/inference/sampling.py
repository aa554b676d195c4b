"""How the next token is chosen: the settings in force, and a sampler whose draws don't depend on the batch.

A row's random numbers come from its own generator, seeded by the row. So the same prompt with the same seed gets the
same answer whichever rows it is batched with, and a job that was killed and resumed gives the answers of one that
was not. `generate` of transformers draws from one generator for the whole batch, which can't promise that; here it
runs its greedy loop, and `RowSampler` leaves it exactly one candidate per row.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LogitsProcessor

from swift.config.inference import GenerationConfig
from swift.core.errors import NumericsError, UsageError
from swift.inference.choosing.filters import Filters, sample_tokens
from swift.inference.requests import SamplingParams, Structure

DEFAULT_NEW_TOKENS = 512


def resolve_sampling(config: GenerationConfig, defaults: Any) -> SamplingParams:
    """Fill what the user left open from the model's own `generation_config`.

    A model that samples by default (`do_sample`) keeps its temperature, top_p, top_k and min_p; other models are
    greedy, unless the user gives a temperature, top_p, top_k or min_p.

    Args:
        config: the user's settings.
        defaults: a transformers `GenerationConfig`; None for none.

    Raises:
        UsageError: a value is out of range, or beam search is combined with sampling.
    """
    _check(config)
    model_samples = bool(getattr(defaults, "do_sample", None)) and config.num_beams == 1
    filters = (config.top_p, config.top_k, config.min_p)
    user_samples = config.temperature is None and any(value is not None for value in filters)

    def pick(name: str, off: float) -> float:
        value = getattr(config, name, None)
        if value is None and model_samples:
            value = getattr(defaults, name, None)
        return off if value is None else value

    temperature = pick("temperature", 1.0 if model_samples or user_samples else 0.0)
    if config.num_beams > 1 and temperature > 0:
        raise UsageError(
            f"--num_beams {config.num_beams} searches, it doesn't sample, but --temperature, --top_p or --top_k is set",
            where="--num_beams",
            fix="leave out --num_beams to sample, or the sampling flags to search",
        )
    penalty = config.repetition_penalty
    if penalty is None:
        penalty = getattr(defaults, "repetition_penalty", None) or 1.0
    return SamplingParams(
        max_new_tokens=config.max_new_tokens or max(DEFAULT_NEW_TOKENS, config.min_new_tokens),
        temperature=float(temperature),
        top_p=float(pick("top_p", 1.0)),
        top_k=max(0, int(pick("top_k", 0))),
        min_p=float(pick("min_p", 0.0)),
        repetition_penalty=float(penalty),
        min_new_tokens=config.min_new_tokens,
        presence_penalty=float(config.presence_penalty),
        frequency_penalty=float(config.frequency_penalty),
        num_beams=config.num_beams,
        length_penalty=float(config.length_penalty),
        stop=tuple(word for word in config.stop_words if word),
        stop_token_ids=tuple(config.stop_token_ids),
        ignore_eos=config.ignore_eos,
        logprobs=(config.top_logprobs or 0) if config.logprobs else None,
        structure=read_structure(config),
        seed=str(config.seed),
    )


def read_structure(config: GenerationConfig) -> Structure | None:
    """What answers have to look like, read from its file where it is in one.

    Raises:
        UsageError: there is no such file, or several things are asked for.
    """
    schema, regex = config.structured_outputs_json, config.structured_outputs_regex
    choice, grammar = config.structured_outputs_choice, config.structured_outputs_grammar
    if sum(map(bool, (schema, regex, choice, grammar))) > 1:
        raise UsageError("answers can have one form", where="--structured_outputs_*", fix="keep one of these settings")
    if schema == "object":
        return Structure("json")
    if schema:
        inline = schema.lstrip().startswith("{")
        return Structure("json_schema", schema if inline else _contents(schema, "--structured_outputs_json"))
    if regex:
        return Structure("regex", regex)
    if choice:
        return Structure("choice", json.dumps(choice))
    return Structure("grammar", _contents(grammar, "--structured_outputs_grammar")) if grammar else None


def _contents(file: str, flag: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} can't be read: {error}", where=flag, fix="name a text file") from error


def _check(config: GenerationConfig) -> None:
    limits = [
        ("max_new_tokens", config.max_new_tokens, lambda v: v >= 1, "at least 1"),
        ("temperature", config.temperature, lambda v: v >= 0, "0 (greedy) or above"),
        ("top_p", config.top_p, lambda v: 0 < v <= 1, "above 0 and at most 1"),
        ("top_k", config.top_k, lambda v: v >= -1, "1 or above; 0 or -1 switch it off"),
        ("min_p", config.min_p, lambda v: 0 <= v <= 1, "from 0 to 1"),
        ("repetition_penalty", config.repetition_penalty, lambda v: v > 0, "above 0; 1 switches it off"),
        ("presence_penalty", config.presence_penalty, lambda v: -2 <= v <= 2, "from -2 to 2"),
        ("frequency_penalty", config.frequency_penalty, lambda v: -2 <= v <= 2, "from -2 to 2"),
        ("length_penalty", config.length_penalty, lambda v: -10 <= v <= 10, "from -10 to 10"),
        ("min_new_tokens", config.min_new_tokens, lambda v: v >= 0, "0 or above"),
        ("top_logprobs", config.top_logprobs, lambda v: v >= 0, "0 or above"),
        ("num_return_sequences", config.num_return_sequences, lambda v: v >= 1, "at least 1"),
        ("num_beams", config.num_beams, lambda v: v >= 1, "at least 1"),
    ]
    for name, value, valid, wanted in limits:
        if value is not None and not valid(value):
            raise UsageError(f"--{name} {value} is not possible", where=f"--{name}", fix=f"give a value {wanted}")


class RowSampler(LogitsProcessor):
    """Samples one token per row and leaves it as the only candidate.

    Args:
        sampling: temperature above 0; top_k, top_p and min_p are applied in this order.
        seeds: one per row, [batch].
    """

    def __init__(self, sampling: SamplingParams, seeds: Sequence[int | str]) -> None:
        self._sampling = sampling
        self._draws = row_draws(sampling, seeds)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores in and out: [batch, vocab] float32."""
        draws = torch.tensor([draw.random() for draw in self._draws], dtype=scores.dtype, device=scores.device)
        only = torch.full_like(scores, -torch.inf).scatter_(-1, choose_tokens(scores, draws, self._sampling), 0.0)
        return cast(torch.FloatTensor, only)


def row_draws(sampling: SamplingParams, seeds: Iterable[int | str]) -> list[random.Random]:
    """The generator of each row's random numbers, one of which chooses each token."""
    return [random.Random(f"{sampling.seed}/{seed}") for seed in seeds]


def choose_tokens(scores: torch.Tensor, draws: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """One token for each row by its random number.

    Args:
        scores: [batch, vocab], logits; sampling: temperature above 0.
        draws: [batch], from 0 to below 1.

    Returns:
        int64 [batch, 1].
    """
    filters = Filters(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return sample_tokens(scores, draws.tolist(), [filters] * len(scores))[:, None]


class FiniteCheck(LogitsProcessor):
    """Stops generation when the model's scores are NaN: argmax over NaN would answer with nonsense."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Scores pass unchanged, [batch, vocab]."""
        if bool(torch.isnan(scores).any()):
            raise NumericsError(
                "the model's scores are NaN while generating",
                fix="with float16, use --torch_dtype bfloat16 or float32; otherwise the weights hold NaN: "
                "take an earlier checkpoint",
            )
        return scores
