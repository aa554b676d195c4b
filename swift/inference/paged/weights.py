"""The weights of an engine's model: replaced by name while it serves, let go of and given back.

In reinforcement learning the trainer hands its weights over after each update. They arrive under the model's own names
and end up where the engine reads them: in plain parameters, and in the packed form of served linear layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from swift.core.errors import ModelError, did_you_mean
from swift.inference.paged.linear import ServedLinear


class ServedWeights:
    """The parameters of one model.

    Args:
        model: its linear layers are served ones.
    """

    def __init__(self, model: nn.Module) -> None:
        # one parameter may have several names (tied embeddings): the first one stands for all, each place is filled
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        self._stands_for: dict[str, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        first: dict[int, str] = {}
        for path, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                name = f"{path}.{key}" if path else key
                known = first.setdefault(id(parameter), name)
                self._stands_for[name] = known
                self._places.setdefault(known, []).append((module, key))
                self._shapes[name] = parameter.shape
        self._dtypes = {name: getattr(*places[0]).dtype for name, places in self._places.items()}
        self._missing: set[str] = set()

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """What there is, by name."""
        return dict(self._shapes)

    @property
    def missing(self) -> frozenset[str]:
        """Weights that were let go of and not given back yet."""
        return frozenset(self._missing)

    def update(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace weights.

        Raises:
            ModelError: a name or a shape that the model doesn't have; then nothing was replaced.
        """
        given: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            if name not in self._shapes:
                hint = did_you_mean(name, self._shapes)
                raise ModelError(f"the model has no weight called {name!r}", fix=hint or None)
            if tensor.shape != self._shapes[name]:
                raise ModelError(
                    f"{name} has the shape {list(self._shapes[name])}, and {list(tensor.shape)} was given",
                    fix="give weights of the same model",
                )
            given[self._stands_for[name]] = tensor
        for name, tensor in given.items():
            self._fill(name, tensor)
            self._missing.discard(name)

    def sleep(self, level: int) -> None:
        """Let go of the weights' memory: level 1 keeps them (on a CPU there is nowhere to move them to), 2 forgets."""
        if level < 2:
            return
        for name, places in self._places.items():
            self._missing.add(name)
            for module, key in places:
                old = getattr(module, key)
                setattr(module, key, nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=False))
                if isinstance(module, ServedLinear) and key == "weight":
                    module.let_go()

    def _fill(self, name: str, tensor: torch.Tensor) -> None:
        for module, key in self._places[name]:
            value = tensor.detach().to(dtype=self._dtypes[name], copy=True)
            if isinstance(module, ServedLinear) and key == "weight":
                module.replace(value)
                continue
            old = getattr(module, key)
            if old.device.type == "meta":
                setattr(module, key, nn.Parameter(value, requires_grad=False))
            else:
                old.data.copy_(value)
