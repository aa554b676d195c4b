"""Which sizes of the tensor-parallel axis a model's configuration allows. Knows nothing of modules or processes."""

from __future__ import annotations

from typing import Any

from swift.core.errors import UsageError

_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
)


def check_tensor_parallel(config: Any, tp: int) -> None:
    """Refuse a size that doesn't divide what has to be cut.

    Heads and the widths of feed-forward and expert matrices must be multiples of `tp`. Key-value heads must be so too,
    or `tp` a multiple of them: then neighbouring ranks hold the same head. A vocabulary may be cut unevenly, as long as
    each rank gets some of it.

    Args:
        config: of the Hugging Face model; of a multimodal one, its text part counts.

    Raises:
        UsageError: it names what doesn't divide, and the nearest possible sizes.
    """
    text = config.get_text_config()
    wrong = _refusals(text, tp)
    if not wrong:
        return
    possible = [size for size in range(1, int(text.num_attention_heads) + 1) if not _refusals(text, size)]
    below = max((size for size in possible if size < tp), default=1)
    above = min((size for size in possible if size > tp), default=None)
    words = f"--tensor_parallel_size {below}" + (f" or {above}" if above else "")
    raise UsageError(
        f"{type(text).__name__} can't be cut over {tp} ranks: {'; '.join(wrong)}",
        where="--tensor_parallel_size",
        fix=words,
    )


def _refusals(text: Any, tp: int) -> list[str]:
    heads = int(text.num_attention_heads)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    wrong = [f"{heads} heads"] if heads % tp else []
    if kv_heads % tp and tp % kv_heads:
        wrong.append(f"{kv_heads} key-value heads")
    for name in _WIDTHS:
        value = getattr(text, name, None)
        for width in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(width, int) and width % tp:
                wrong.append(f"{name} {width}")
                break
    rows = -(-text.vocab_size // tp)
    if rows * (tp - 1) >= text.vocab_size:
        wrong.append(f"a vocabulary of {text.vocab_size}")
    return wrong


def vocabulary_share(size: int, tp: int, rank: int) -> tuple[int, int]:
    """First and last (exclusive) token of rank `rank`: shares as `torch.chunk` makes them, the last one smaller."""
    rows = -(-size // tp)
    return min(rank * rows, size), min((rank + 1) * rows, size)
