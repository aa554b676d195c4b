"""What every way of running a model offers: requests in, updates out, and what training asks of it besides.

A backend takes token ids, so that every backend is served the tokens that training saw. It knows nothing of
conversations, files or HTTP servers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from swift.inference.requests import Request, Sink

if TYPE_CHECKING:
    import torch

Feature = Literal[
    "logprobs", "prompt_logprobs", "structure", "beams", "penalties", "logit_bias", "min_p", "adapters",
    "weight_update", "sleep",
]  # fmt: skip


@dataclass(frozen=True)
class ModelInfo:
    """What a caller must know of the model behind a backend.

    Attributes:
        context_length: tokens that prompt and answer may have together; None when the model names no limit.
        vocab_size: ids below it are allowed.
        stop_token_ids: what ends an answer unless a request says otherwise.
        features: what requests may ask for. A request that asks for more is refused by name (UsageError), never
            answered without it.
        max_logprobs: most `logprobs` of a request.
    """

    context_length: int | None
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    features: frozenset[Feature]
    max_logprobs: int = 20


@dataclass
class EngineStats:
    """How a backend is doing. Numbers that a backend doesn't know stay 0.

    Attributes:
        num_running, num_waiting: requests.
        blocks_used, blocks_total: of the KV cache. Blocks that only the prefix cache holds count as free.
        prompt_tokens, cached_tokens, generated_tokens: since the start; `cached_tokens` are those of the prompts that
            the prefix cache held.
        preemptions: requests that had to give their blocks back and were computed again.
        steps: forward passes.
        utilisation: rows computed over rows that were possible, since the start, 0 to 1.
        draft_tokens, accepted_tokens: of speculative decoding.
        adapters: names loaded.
        asleep: weights are out of the device's memory.
    """

    num_running: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    utilisation: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    adapters: list[str] = field(default_factory=list)
    asleep: bool = False


class Backend(Protocol):
    """What runs a model. All methods may be called from any thread.

    Attributes:
        name: as in `--infer_backend`.
        info: of the model.
    """

    @property
    def name(self) -> str: ...

    @property
    def info(self) -> ModelInfo: ...

    def start(self) -> None:
        """Get ready for requests; returns when the first one would be answered. Called once.

        Raises:
            SwiftError: it can't be started; the message holds what it said last.
        """
        ...

    def close(self) -> None:
        """End: requests that are still there end as `cancelled`, processes that it started are gone. Idempotent."""
        ...

    def submit(self, request: Request, sink: Sink) -> None:
        """Take a request; `sink` gets its updates, the last one with a `finish_reason`, whatever happens.

        Raises:
            UsageError, DataError: the request can't be answered: too long, an id beyond the vocabulary, a feature that
                isn't there, a name that no adapter has. Then `sink` is never called.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """End a request; its last update says `cancelled`. Nothing happens where it has ended already."""
        ...

    def stats(self) -> EngineStats: ...

    def load_adapter(self, name: str, folder: Path) -> None:
        """Make an adapter available under `name`.

        Raises:
            UsageError: the name is taken. ModelError: the folder holds none that fits.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; requests that use it end first.

        Raises:
            UsageError: there is none of that name.
        """
        ...

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace parameters by name (the model's own names), between two steps; what was cached is forgotten.

        Raises:
            ModelError: a name or a shape that the model doesn't have; then nothing was replaced.
        """
        ...

    def sleep(self, level: int = 1) -> None:
        """Give memory back: 1 keeps the weights in main memory, 2 forgets them. Running requests end first."""
        ...

    def wake(self) -> None:
        """Undo `sleep`; after level 2 weights must be given by `update_weights` before the next request."""
        ...
