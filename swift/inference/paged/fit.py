"""Whether a model can be run over a paged cache, how wide its keys and values are, and a proof that it is right.

A configuration says what a model is called, not what its code does. So shapes are taken from a tiny forward pass, and
hidden states through the cache are compared with the model's own before the first request is answered.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from swift.core.errors import ModelError
from swift.inference.paged.attention import PAGED
from swift.inference.paged.cache import KVCache, LayerShape
from swift.inference.paged.runner import ModelRunner
from swift.inference.paged.sequence import Piece, Placement
from swift.models.attention import LARGEST_WINDOW_TRIED, varlen_unsupported_reason
from swift.models.kinds import task_of

_RECORD = "record_shapes"
# largest relative difference of hidden states that is rounding
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def paged_unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why this model can't be run over a paged cache, or None when its configuration allows it."""
    if task_of(model).kind != "causal_lm" or model.get_output_embeddings() is None:
        return "it generates nothing"
    reason = varlen_unsupported_reason(model)
    if reason is not None:
        return reason
    config = model.config.get_text_config()
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers use the keys and values of others"
    return None


@torch.no_grad()
def layer_shapes(model: PreTrainedModel) -> dict[int, LayerShape]:
    """Heads and widths of each attention layer, by its number, as a forward pass shows them.

    Raises:
        ModelError: the model's attention doesn't tell them.
    """
    found: dict[int, LayerShape] = {}

    def record(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[Any, None]:
        found[module.layer_idx] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    before = model.config._attn_implementation
    AttentionInterface.register(_RECORD, record)
    AttentionMaskInterface.register(_RECORD, lambda *args, **kwargs: None)
    try:
        model.set_attn_implementation(_RECORD)
        ids = torch.zeros(1, 4, dtype=torch.long, device=_embeddings(model).device)
        model.base_model(input_ids=ids, use_cache=False)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _unproven(model, f"it doesn't run through the attention interface: {error}") from error
    finally:
        model.set_attn_implementation(before)
    return dict(sorted(found.items()))


@torch.no_grad()
def prove_paged(model: PreTrainedModel, shapes: dict[int, LayerShape]) -> None:
    """Check hidden states through a paged cache against the model's own, on random tokens.

    Two requests are computed in turns: their prompts in pieces, then single tokens, in blocks that lie in no order.

    Args:
        model: its attention implementation is `paged`.
        shapes: see `layer_shapes`.

    Raises:
        ModelError: they differ by more than rounding, or the model can't be run that way at all.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    size = 16  # the usual one: compiled loops are made for each
    length = max(size + 3, window + 3 if window and window <= LARGEST_WINDOW_TRIED else 0)
    embeddings = _embeddings(model)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, config.vocab_size, (2, length), generator=generator)
    blocks = -(-length // size)
    runner = ModelRunner(model)
    runner.cache = KVCache(shapes, 2 * blocks, size, embeddings.dtype, embeddings.device)
    places = [Placement([2 * k + 1 for k in reversed(range(blocks))]), Placement([2 * k for k in range(blocks)])]

    def in_pieces() -> torch.Tensor:
        found: list[list[torch.Tensor]] = [[], []]
        borders = [0, 3, *range(length - 3, length + 1)]
        for start, end in pairwise(borders):
            pieces = [
                Piece(place, start, text[start:end].tolist(), 0, range(end - start))
                for place, text in zip(places, texts, strict=True)
            ]
            rows = runner.hidden(pieces)
            found[0].append(rows[: end - start])
            found[1].append(rows[end - start :])
        return torch.stack([torch.cat(rows) for rows in found])

    def whole() -> torch.Tensor:
        model.set_attn_implementation("eager")  # the one way that knows soft caps and sinks
        try:
            return model.base_model(input_ids=texts.to(embeddings.device), use_cache=False).last_hidden_state
        finally:
            model.set_attn_implementation(PAGED)

    try:
        ours, reference = in_pieces(), whole()
    except (RuntimeError, TypeError) as error:  # kernels and signatures refuse in their own ways
        raise _unproven(model, f"it can't be run in steps: {' '.join(str(error).split())[:300]}") from error
    difference = float((ours - reference).float().norm() / reference.float().norm())
    if not difference <= _TOLERANCE[reference.dtype]:
        raise _unproven(model, f"steps over a paged cache give other hidden states (relative {difference:.1e})")


def _embeddings(model: PreTrainedModel) -> torch.Tensor:
    module: Any = model.get_input_embeddings()
    return module.weight


def _unproven(model: PreTrainedModel, message: str) -> ModelError:
    return ModelError(
        f"the engine can't run {type(model).__name__}: {message}",
        where="--infer_backend swift",
        fix="--infer_backend transformers",
    )
