"""How the ranks that share a sequence divide attention: by heads, or by tokens in a ring. Arithmetic only."""

from __future__ import annotations

import math

from swift.core.errors import UsageError


def resolve_context(attention_impl: str, cp: int, heads_per_tp: int, kv_heads_per_tp: int) -> tuple[int, int]:
    """Sizes of the axes `ring` and `ulysses`, whose product is `cp`.

    Ulysses ranks exchange heads for tokens: less is sent than round a ring, but they can't be more than the heads.
    Where key-value heads don't suffice each is sent to several ranks. `auto` takes as many Ulysses ranks as key-value
    heads divide among; if there are none such, as query heads do; and a ring for the rest.

    Args:
        attention_impl: auto, ulysses, ring or allgather (a ring that gathers keys and values at once).
        heads_per_tp, kv_heads_per_tp: query and key-value heads that one tensor-parallel rank has.

    Raises:
        UsageError: Ulysses alone is asked for, and the heads don't divide.
    """
    if attention_impl in ("ring", "allgather"):
        return cp, 1
    shared = math.gcd(cp, heads_per_tp)
    if attention_impl == "auto":
        ulysses = _largest_divisor(cp, heads_per_tp, kv_heads_per_tp)
        return cp // ulysses, ulysses
    if shared != cp:
        below = max(size for size in range(1, cp) if heads_per_tp % size == 0)
        raise UsageError(
            f"{heads_per_tp} attention heads (of one tensor-parallel rank) can't be divided among {cp} ranks",
            where="--sequence_parallel_size with --attention_impl ulysses",
            fix=f"use --sequence_parallel_size {below}, or --attention_impl auto "
            f"(ring {cp // shared} x ulysses {shared})",
        )
    return 1, cp


def _largest_divisor(cp: int, heads: int, kv_heads: int) -> int:
    """Ulysses ranks without sending a key-value head twice, or if that makes none, with."""
    plain = math.gcd(cp, math.gcd(heads, kv_heads))
    return plain if plain > 1 else math.gcd(cp, heads)
