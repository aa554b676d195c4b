"""Ranks that step alone and agree from time to time: local SGD, DiLoCo and streaming DiLoCo.

Each rank trains its own copy of the weights on its own examples. Every so many steps the ranks average how far they
came from the weights that they last agreed on (the pseudo-gradient), and an outer optimizer moves these by it:

    d = mean over ranks of (shared - own)
    v = momentum v + d
    shared = shared - outer_lr (d + momentum v)          Nesterov's SGD
    own = shared

With outer_lr 1 and momentum 0 this averages the weights, which is local SGD (arXiv 1805.09767); DiLoCo is
arXiv 2311.08105, algorithm 1. In streaming DiLoCo (arXiv 2501.18512) groups of layers, the fragments, take turns, so
the same bytes are spread over the steps; and a result may be used `delay` steps after its exchange began, which gives
the network that long while ranks go on: own = alpha own + (1 - alpha) shared.

A rank's gradient is that of the sum of its own losses divided by what a rank has on average of the step's weight, so a
rank with more tokens moves further, and the mean over ranks is what all would have moved together: with plain SGD and
`every` 1, local SGD is the usual step. The optimizer's moments stay local. The loop still adds up two short lists of
numbers a step (weights and losses), so ranks stay in step with one another; gradients aren't exchanged.

Evaluation and checkpoints take the shared weights; a checkpoint also has what is each rank's own, and a run goes on
from it exactly, on as many ranks. At the last step all fragments are brought together. This file knows nothing of
models but the names of their parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from swift.config.communication import LocalUpdates
from swift.core.errors import UsageError
from swift.distributed.mesh import Axis
from swift.distributed.traffic import TRAFFIC
from swift.training.trainer import Trainer
from swift.training.trainer_parts import Callback

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass
class _Underway:
    """An exchange that was started: the differences of a fragment, added up over ranks once `work` is done."""

    fragment: int
    due: int
    total: torch.Tensor
    work: dist.Work | None = None

    def wait(self) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.total


class LocalSteps(Callback):
    """The outer optimizer: keeps the shared weights and brings the ranks together.

    Args:
        named: the trained parameters; their present values, equal on all ranks, are the shared ones.
        optimizer: the inner one, whose state is each rank's own.
        axis: the ranks. Exchanges with a delay should have a group of their own, so that other collectives don't queue
            behind them.
    """

    without_it: str | None = None

    def __init__(
        self,
        settings: LocalUpdates,
        named: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        axis: Axis,
    ) -> None:
        self.settings = settings
        self.axis = axis
        self._optimizer = optimizer
        self._parameters = dict(named)
        self._shared = {name: p.detach().clone() for name, p in self._parameters.items()}
        self._velocity = {name: torch.zeros_like(p) for name, p in self._shared.items()}
        self._fragments = cut_into_fragments(list(self._parameters), settings.fragments)
        self._underway: list[_Underway] = []
        self._showing_shared = False

    # --- the steps ---

    def after_phase(self, trainer: Trainer, phase: str) -> None:
        if phase == "rescale":  # the step is done and counted, and not yet evaluated or saved
            self.after_step(trainer.state.step, ending=trainer.parts.length.reached(trainer.state))

    @torch.no_grad()
    def after_step(self, step: int, *, ending: bool = False) -> None:
        """What is due after `step` steps; at the end, everything."""
        every, fragments = self.settings.every, len(self._fragments)
        for underway in [u for u in self._underway if ending or u.due <= step]:
            self._apply(underway, keep=self.settings.alpha)
        for number in range(fragments):
            offset = number * every // fragments
            if ending or (step > offset and (step - offset) % every == 0):
                underway = self._start(number, step)
                if ending or not self.settings.delay:
                    self._apply(underway, keep=0.0)

    def _start(self, number: int, step: int) -> _Underway:
        """Begin to add up how far the ranks came with a fragment."""
        dtype = _DTYPES[self.settings.dtype]
        parts = [(self._shared[n] - self._parameters[n]).flatten() for n in self._fragments[number]]
        total = torch.cat(parts).to(dtype)
        work = None
        if self.axis:
            share = 2 * (self.axis.size - 1) / self.axis.size
            TRAFFIC.count(self.axis.name, "outer", share * total.numel() * total.element_size())
            work = dist.all_reduce(total, group=self.axis.group, async_op=True)
        underway = _Underway(number, step + self.settings.delay, total, work)
        self._underway.append(underway)
        return underway

    def _apply(self, underway: _Underway, keep: float) -> None:
        """The outer step of a fragment, and what the rank goes on with: `keep` of its own weights and else the shared
        ones."""
        self._underway.remove(underway)
        settings = self.settings
        total = underway.wait().float() / self.axis.size
        names = self._fragments[underway.fragment]
        for name, difference in zip(names, total.split([self._shared[n].numel() for n in names]), strict=True):
            shared, velocity, own = self._shared[name], self._velocity[name], self._parameters[name]
            difference = difference.view_as(shared)
            velocity.mul_(settings.outer_momentum).add_(difference)
            shared.sub_(difference + settings.outer_momentum * velocity, alpha=settings.outer_lr)
            own.copy_(shared + keep * (own - shared) if keep else shared)

    # --- what others see ---

    @contextmanager
    def shared_weights(self) -> Iterator[None]:
        """The model has the shared weights in here, whatever its rank's own are."""
        self._exchange_weights()
        try:
            yield
        finally:
            self._exchange_weights()

    def _exchange_weights(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self._shared[name] = self._shared[name], parameter.data
        self._showing_shared = not self._showing_shared

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on beside the shared weights, which the checkpoint has anyhow."""
        own = self._shared if self._showing_shared else {n: p.detach() for n, p in self._parameters.items()}
        return {
            "own": dict(own),
            "velocity": self._velocity,
            "optimizer": self._optimizer.state_dict()["state"],
            "underway": [(u.fragment, u.due, u.wait()) for u in self._underway],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave on this rank; the parameters hold the shared weights."""
        for name, parameter in self._parameters.items():
            self._shared[name].copy_(parameter)
            self._velocity[name].copy_(state["velocity"][name])
            parameter.copy_(state["own"][name])
        groups = self._optimizer.state_dict()["param_groups"]  # today's rates hold
        self._optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        self._underway = [
            _Underway(number, due, total.to(next(iter(self._shared.values())).device))
            for number, due, total in state["underway"]
        ]

    def words(self) -> str:
        """For the user."""
        settings = self.settings
        size = sum(tensor.numel() for tensor in self._shared.values()) * _DTYPES[settings.dtype].itemsize
        how = f"{self.axis.size} rank(s) step alone and agree every {settings.every} steps"
        how += f" in {len(self._fragments)} turns" if len(self._fragments) > 1 else ""
        how += f", {settings.delay} steps late" if settings.delay else ""
        return f"{settings.method}: {how}, on {size / 2**20:.1f} MiB"


def cut_into_fragments(names: list[str], count: int) -> list[list[str]]:
    """Parameters in `count` groups that take turns: every `count`-th layer from the first to the last; what is in no
    layer counts as one by itself (the strided pattern of arXiv 2501.18512, section 3.1).

    Raises:
        UsageError: there are fewer layers than fragments.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        found = _LAYER.search(name)
        layers.setdefault(name[: found.end()] if found else name.rpartition(".")[0], []).append(name)
    groups = list(layers.values())
    if len(groups) < count:
        raise UsageError(
            f"{count} fragments can't be made of {len(groups)} layers",
            where="--local_updates",
            fix=f'give "fragments" of at most {len(groups)}',
        )
    return [[name for group in groups[number::count] for name in group] for number in range(count)]
