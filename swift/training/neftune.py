"""Noise on embeddings while training (NEFTune, arXiv 2310.05914, algorithm 1)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from swift.data.loading.batch import Batch


class EmbeddingNoise:
    """Adds uniform noise of magnitude alpha / sqrt(length * width) to what `embedding` gives in training mode.

    The length is the example's own, so neither padding nor packing changes the noise's size.
    """

    def __init__(self, embedding: nn.Module, alpha: float) -> None:
        self._alpha = alpha
        self._lengths: torch.Tensor | None = None
        embedding.register_forward_hook(self._add)

    def see(self, batch: Batch) -> None:
        """The micro-batch that is embedded next."""
        if batch.borders is not None:
            self._lengths = torch.tensor([end - start for start, end in pairwise(batch.borders)])
        else:
            self._lengths = batch.attention_mask.sum(1) if batch.attention_mask is not None else None

    def _add(self, embedding: nn.Module, _: tuple, output: torch.Tensor) -> torch.Tensor:
        if not embedding.training or self._lengths is None:
            return output
        rows, tokens, width = output.shape
        lengths = self._lengths.to(output.device)
        if rows == 1 and len(lengths) != 1:
            per_token = lengths.repeat_interleave(lengths)[None, :, None]
        else:
            per_token = lengths[:, None, None].expand(rows, tokens, 1)
        magnitude = self._alpha / torch.sqrt(per_token.to(output.dtype) * width)
        return output + torch.empty_like(output).uniform_(-1, 1) * magnitude
