"""Which backend runs a model, and the backend itself with the weights in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swift.inference.backends.base import Backend
from swift.inference.backends.transformers import TransformersBackend

if TYPE_CHECKING:
    from swift.inference.loading import Prepared


def make_backend(prepared: Prepared) -> Backend:
    """The backend that `--infer_backend` asks for, the weights read; it isn't started yet.

    Raises:
        ModelError: weights that don't fit, or a merge that changes the answers.
    """
    return TransformersBackend(
        prepared.weights(),
        prepared.tokenizer,
        prepared.stop_token_ids(),
        max_batch_size=prepared.config.infer.max_batch_size,
    )
