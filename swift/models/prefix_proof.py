"""Whether a model's prompts can be shared by several completions, and the proof that it makes no difference.

It knows nothing of methods or batches: whoever lays out rows asks here first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate

import torch
from transformers import PreTrainedModel

from swift.core.errors import ModelError
from swift.models.attention import (
    LARGEST_WINDOW_TRIED,
    VARLEN,
    prove_equal,
    segment_arguments,
    varlen_unsupported_reason,
)

# Lengths of a prefix (0: none) and of the parts that go on from it.
Shape = tuple[int, tuple[int, ...]]


def shares_prefixes(model: PreTrainedModel) -> str | None:
    """Why sequences of this model can't share a prefix, or None when its configuration allows it.

    Ask after its attention implementation was chosen; `prove_prefixes` then tries it.
    """
    reason = varlen_unsupported_reason(model)
    if reason:
        return reason
    implementation = model.config._attn_implementation
    if implementation != VARLEN:
        return f"its attention implementation, {implementation}, lets a segment see nothing but itself"
    return None


def why_written_out(
    model: PreTrainedModel, base: torch.nn.Module, autocast: Callable[[], AbstractContextManager]
) -> str | None:
    """Why sequences need a copy of the prefix each; None where they can share one, which was tried."""
    reason = shares_prefixes(model)
    if reason is None:
        try:
            prove_prefixes(model, base, autocast=autocast)
        except ModelError as error:
            reason = error.message
    return reason


def prove_prefixes(
    model: PreTrainedModel,
    base: torch.nn.Module,
    *,
    shapes: tuple[Shape, ...] = ((7, (5, 3)), (0, (4,)), (2, (9,)), (4, (1, 6, 2))),
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> None:
    """Check that sequences that share a prefix have the hidden states of sequences written out, on random tokens.

    Args:
        model: the model, with `varlen` as its attention implementation; `base` is its decoder.
        shapes: units to try. One whose parts reach past the model's sliding window is added when the window is small;
            a larger one is proven inside the window only.
        autocast: makes the context that forward passes run in when training.

    Raises:
        ModelError: when they differ by more than rounding, or the model can't be run that way at all.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window and window <= LARGEST_WINDOW_TRIED:
        shapes = (*shapes, (window, (3, window + 2)))
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    units = [
        [torch.randint(0, config.vocab_size, (n,), generator=generator).to(device) for n in (prefix, *parts)]
        for prefix, parts in shapes
    ]

    def together() -> torch.Tensor:
        borders, prefixes, positions = lay_out(shapes)
        return base(
            input_ids=torch.cat([piece for unit in units for piece in unit])[None],
            position_ids=torch.tensor(positions, device=device)[None],
            use_cache=False,
            **segment_arguments(borders, device, prefixes=prefixes),
        ).last_hidden_state

    def alone() -> torch.Tensor:
        rows = []
        for prefix, *parts in units:
            for number, part in enumerate(parts):
                states = base(input_ids=torch.cat([prefix, part])[None], use_cache=False).last_hidden_state
                rows.append(states if number == 0 else states[:, len(prefix) :])
        return torch.cat(rows, 1)

    prove_equal(model, together, alone, what="sequences that share a prefix", autocast=autocast)


def lay_out(shapes: tuple[Shape, ...]) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """One row of all units: borders of segments, what each sees before its own, and positions of tokens."""
    borders: list[int] = [0]
    prefixes: list[tuple[int, int]] = []
    positions: list[int] = []
    for prefix, parts in shapes:
        start = borders[-1]
        if prefix:
            borders.append(start + prefix)
            prefixes.append((0, 0))
            positions += range(prefix)
        seen = (start, start + prefix) if prefix else (0, 0)
        borders += [borders[-1] + n for n in accumulate(parts)]
        prefixes += [seen] * len(parts)
        positions += [prefix + i for n in parts for i in range(n)]
    return borders, prefixes, positions
