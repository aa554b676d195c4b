"""`context`: the attention implementation of a model whose sequences are shared by ranks.

It enters any Hugging Face model through the attention interface, as `varlen` does, and reads the segment borders of the
whole row from `cu_seq_lens_q`; queries, keys and values are those of this rank's tokens (`batches` says which). Heads
are exchanged for tokens along the axis `ulysses`, and along `ring` keys and values travel, or are gathered.

Which axes these are is known per model: `use_context_attention` notes them for each of its modules, and the attention
function is told which module calls it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from swift.core.errors import ModelError
from swift.distributed.context.gather_kv import dropout_attention, gather_row, tiled_attention
from swift.distributed.context.kernels import Inputs, Scores
from swift.distributed.context.ring import Ring, ring_attention
from swift.distributed.context.tiles import Tile, gathered_tiles, ring_tiles, whole_tiles
from swift.distributed.context.ulysses import to_heads, to_tokens
from swift.distributed.mesh import Axis
from swift.distributed.spread import Spread
from swift.models.attention import VARLEN, varlen_attention, varlen_unsupported_reason

CONTEXT = "context"


@dataclass
class _Sharing:
    """How one model's sequences are shared.

    Attributes:
        gathers: keys and values are gathered along `ring` instead of travelling.
    """

    ring: Axis
    ulysses: Axis
    gathers: bool
    _row: tuple[torch.Tensor, int] | None = None
    _borders: list[int] = field(default_factory=list)
    _plans: dict[Any, list] = field(default_factory=dict)

    def steps(self, cu_seqlens: torch.Tensor, window: int | None) -> list[list[Tile]]:
        """Tiles of each step; with gathered keys there is one."""
        self._read(cu_seqlens)
        if window not in self._plans:
            row = (self._borders, self.ring.size, self.ring.rank, window)
            self._plans[window] = [gathered_tiles(*row)] if self.gathers else ring_tiles(*row)
        return self._plans[window]

    def whole(self, cu_seqlens: torch.Tensor) -> list[Tile]:
        """Tiles with all keys of a query."""
        self._read(cu_seqlens)
        return whole_tiles(self._borders, self.ring.size, self.ring.rank)

    def _read(self, cu_seqlens: torch.Tensor) -> None:
        """All layers of a forward pass are given the same tensor: it is looked at once."""
        if self._row is None or self._row[0] is not cu_seqlens or self._row[1] != cu_seqlens._version:
            self._row = cu_seqlens, cu_seqlens._version
            self._borders = cu_seqlens.tolist()
            self._plans = {}


_SHARING: WeakKeyDictionary[nn.Module, _Sharing] = WeakKeyDictionary()


@torch.compiler.disable
def context_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention-interface function: [1, heads, tokens / cp, head_dim] in, [1, tokens / cp, heads, head_dim] out.

    Args:
        cu_seq_lens_q: int32 [segments + 1], borders in the whole row, from 0 to its length.
        sliding_window, softcap, s_aux, max_length_q: as `varlen_attention` has them.

    Raises:
        ModelError: the model was not prepared for this, borders are missing, or a ring is to drop weights.
    """
    sharing = _SHARING.get(module)
    if sharing is None or cu_seq_lens_q is None or query.shape[0] != 1:
        raise ModelError(
            f"{type(module).__name__} can't tell which ranks share its sequences, or where these begin and end",
            fix="prepare the model by use_context_attention, and give it one row with segment borders",
        )
    device = query.device.type
    if torch.is_autocast_enabled(device):  # rotary leaves fp32 behind
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    heads_shared = sharing.ulysses
    if heads_shared:
        query, key, value = to_heads(query, key, value, heads_shared)
        s_aux = None if s_aux is None else s_aux.chunk(heads_shared.size)[heads_shared.rank]
    if sharing.ring:
        scores = Scores(scale, sliding_window, softcap)
        with torch.autocast(device, enabled=False):
            output = _over_ring(sharing, Inputs(query[0], key[0], value[0]), s_aux, scores, (cu_seq_lens_q, dropout))
        output = output.transpose(0, 1)[None]
    else:
        options: dict[str, Any] = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        options |= {"cu_seq_lens_q": cu_seq_lens_q, "max_length_q": max_length_q}
        output, _ = varlen_attention(module, query, key, value, None, scale, dropout, **options)
    return (to_tokens(output, heads_shared) if heads_shared else output), None


def _over_ring(
    sharing: _Sharing,
    inputs: Inputs,
    sinks: torch.Tensor | None,
    scores: Scores,
    settings: tuple[torch.Tensor, float],
) -> torch.Tensor:
    """[heads, tokens, ...] of this rank -> [heads, tokens, value_dim]; `settings`: borders, dropout."""
    cu_seqlens, dropout = settings
    if not sharing.gathers:
        if dropout:
            raise _no_dropout()
        return ring_attention(inputs, sinks, Ring(sharing.ring, sharing.steps(cu_seqlens, scores.window), scores))
    inputs = Inputs(inputs.query, gather_row(inputs.key, sharing.ring), gather_row(inputs.value, sharing.ring))
    if dropout:
        return dropout_attention(inputs, sinks, sharing.whole(cu_seqlens), scores, dropout)
    return tiled_attention(inputs, sinks, sharing.steps(cu_seqlens, scores.window)[0], scores)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The segments are the mask."""


AttentionInterface.register(CONTEXT, context_attention)
AttentionMaskInterface.register(CONTEXT, _no_mask)


def use_context_attention(causal_lm: PreTrainedModel, spread: Spread, *, gather_kv: bool = False) -> None:
    """Make a model's attention work on shares of sequences; on whole ones where the mesh has no such axes.

    Args:
        gather_kv: `--attention_impl allgather`: gather keys and values along `ring` instead of sending them round.

    Raises:
        ModelError: the model's attention can't be shared, or not in this way; it names what can be done instead.
    """
    ring, ulysses, tp = (spread.mesh[axis] for axis in ("ring", "ulysses", "tp"))
    if not (ring or ulysses):
        causal_lm.set_attn_implementation(VARLEN)
        return
    _check(causal_lm, ring, ulysses, tp.size, gather_kv)
    sharing = _Sharing(ring, ulysses, gather_kv)
    for module in causal_lm.modules():
        _SHARING[module] = sharing
    causal_lm.set_attn_implementation(CONTEXT)


def _check(causal_lm: PreTrainedModel, ring: Axis, ulysses: Axis, tp: int, gather_kv: bool) -> None:
    config = causal_lm.config.get_text_config()
    where = f"model class {type(causal_lm).__name__}"
    reason = varlen_unsupported_reason(causal_lm)
    if reason:
        raise ModelError(f"sequences can't be shared: {reason}", where=where, fix="use --sequence_parallel_size 1")
    rope = _rope_types(config) & {"dynamic", "longrope"}
    if rope:  # ranks would turn their tokens by different angles
        raise ModelError(
            f"sequences can't be shared: rotary embeddings of type {', '.join(sorted(rope))} depend on the longest "
            "position in the batch, and each rank has its own",
            where=where,
            fix="use --sequence_parallel_size 1",
        )
    heads = config.num_attention_heads // tp
    if heads % ulysses.size:
        raise ModelError(
            f"{heads} attention heads (of one tensor-parallel rank) can't be divided among {ulysses.size} ranks",
            where=where,
            fix="use --attention_impl auto",
        )
    dropout = getattr(config, "attention_dropout", None)
    if ring and not gather_kv and dropout:
        raise _no_dropout(where)


def _no_dropout(where: str | None = None) -> ModelError:
    return ModelError(
        "a ring merges attention piece by piece, so it can't drop weights (attention_dropout)",
        where=where,
        fix="use --attention_impl ulysses or allgather, or set attention_dropout to 0 in the model's config.json",
    )


def _rope_types(config: Any) -> set[str]:
    """Kinds of rotary embedding, of all layer types."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return {str(entry.get("rope_type", "default")) for entry in nested or [settings]}
