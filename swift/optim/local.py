"""Let any elementwise optimizer train a model that is spread over processes: it sees what this process holds.

For each trained parameter there is a plain `nn.Parameter` that shares memory with this process's part of it, under the
same name. What an optimizer does element by element comes out the same on parts as on the whole, so no optimizer needs
to know of DTensors; one that looks at whole matrices can't run this way and is refused. A part may be empty.

This file knows nothing of particular optimizers' formulas, nor of how gradients are added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from swift.core.errors import UsageError

# What these compute of a matrix needs all of its rows and columns.
WHOLE_MATRIX_OPTIMIZERS = {"adafactor": "it keeps one number per row and column of each whole matrix"}


class LocalParameters:
    """The trained parameters of a model and this process's parts of them.

    A parameter that isn't a DTensor is its own part.

    Args:
        named: parameters under their names in the model; frozen ones are left out.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._whole = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._parts = {name: _part_of(parameter) for name, parameter in self._whole.items()}

    @property
    def cut(self) -> bool:
        """Whether any parameter is a DTensor."""
        return any(isinstance(parameter, DTensor) for parameter in self._whole.values())

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parts, for `build_optimizer`. A part has as many dimensions as the whole."""
        yield from self._parts.items()

    def named_whole(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and the model's own parameters, in the same order."""
        yield from self._whole.items()

    @torch.no_grad()
    def hand_over_gradients(self) -> None:
        """Give the parts the memory of the parameters' values and gradients as they are now. Nothing is copied.

        Values too, since `fully_shard` moves them when it first runs, and loading may.
        """
        for name, whole in self._whole.items():
            part = self._parts[name]
            if part is whole:
                continue
            part.data = _local(whole)
            part.grad = None if whole.grad is None else _local(whole.grad)

    def drop_gradients(self) -> None:
        """Free the gradients of parts and parameters."""
        for name, whole in self._whole.items():
            whole.grad = self._parts[name].grad = None

    def state(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter name, as tensors that say what part of the whole they are.

        For checkpoints: a state tensor with the shape of the part becomes a DTensor with the parameter's placements
        (and shares memory, so loading into it changes the optimizer's state); anything else, such as the count of
        steps, is equal on all ranks and given as it is. Parameters that were never stepped have no entry.
        """
        states: dict[str, dict[str, Any]] = {}
        for name, part in self._parts.items():
            if part in optimizer.state:
                states[name] = {key: self.like_parameter(name, value) for key, value in optimizer.state[part].items()}
        return states

    def like_parameter(self, name: str, value: Any) -> Any:
        """`value` as a DTensor with the placements of parameter `name`, if it is a tensor of its part's shape."""
        whole, part = self._whole[name], self._parts[name]
        if not isinstance(whole, DTensor) or not isinstance(value, torch.Tensor) or value.shape != part.shape:
            return value
        return DTensor.from_local(
            value, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )


def local_parameters(named: Iterable[tuple[str, nn.Parameter]]) -> LocalParameters:
    """What an optimizer and a checkpoint need of a model that may be spread over processes."""
    return LocalParameters(named)


def check_elementwise(optim: str, *, cut: bool) -> None:
    """Refuse an optimizer that needs whole matrices for a model whose matrices are cut.

    Raises:
        UsageError: says why, and what to use.
    """
    if cut and optim in WHOLE_MATRIX_OPTIMIZERS:
        raise UsageError(
            f"{optim} can't train sharded weights: {WHOLE_MATRIX_OPTIMIZERS[optim]}, and no process holds one",
            where="--optim",
            fix="--optim adamw, or let every process hold the whole model: --fsdp none, --tensor_parallel_size 1",
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's memory of a tensor."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _part_of(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_local(parameter)) if isinstance(parameter, DTensor) else parameter
