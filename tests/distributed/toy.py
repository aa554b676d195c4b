"""A small language and a small model that learns it, for comparing ways of training on several ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

LETTERS = 24
LENGTH = 24


class Toy(nn.Module):
    """Predicts a letter from the two before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, width)
        self.layers = nn.ModuleList(nn.Linear(2 * width if not i else 4 * width, 4 * width) for i in range(2))
        self.head = nn.Linear(4 * width, LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """The mean loss of letters [rows, LENGTH] from the third on."""
        known = self.embed(letters)
        hidden = torch.cat([known[:, :-2], known[:, 1:-1]], -1)
        for layer in self.layers:
            hidden = functional.gelu(layer(hidden))
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), letters[:, 2:].flatten())


def build_toy(seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    return Toy()


def sentences(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Nine letters of ten follow from the two before them by a fixed table."""
    table = torch.randint(0, LETTERS, (LETTERS, LETTERS), generator=torch.Generator().manual_seed(1))
    letters = torch.randint(0, LETTERS, (rows, LENGTH), generator=generator)
    for place in range(2, LENGTH):
        follows = torch.rand(rows, generator=generator) < 0.9
        letters[follows, place] = table[letters[follows, place - 2], letters[follows, place - 1]]
    return letters


def measure(model: nn.Module) -> float:
    """The loss on sentences that no rank trains on."""
    with torch.no_grad():
        return float(model(sentences(64, torch.Generator().manual_seed(7))))
