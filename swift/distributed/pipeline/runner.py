"""Runs micro-batches through the stages of this process and its neighbours on the pipeline's axis.

A stage is a module `stage(received, number)`: it gets the hidden states that the stage before it gave (stage 0: nothing
of use) and the number of a micro-batch, a CPU tensor int64 [1], by which it finds whatever else it needs; it gives
hidden states, and the last one what is differentiated. All micro-batches of a step have one shape, so nobody needs to
ask for it: what travels is described once, by the first run (`describe`), and PyTorch's stages are built from that,
again whenever the number or the length of micro-batches changes (they agree on it with a few bytes each time).

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from swift.distributed.mesh import Axis
from swift.distributed.pipeline.schedules import SCHEDULES, rank_of_stage, schedule_for
from swift.distributed.traffic import TRAFFIC

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Border:
    """What travels from one stage to the next, per token of a rank's micro-batch.

    Attributes:
        share: tokens that travel of each token that a micro-batch has here (less than 1 with sequence parallelism).
    """

    share: float
    width: int
    dtype: torch.dtype

    def tensor(self, tokens: int, device: torch.device | str, **options: Any) -> torch.Tensor:
        """An empty tensor [1, tokens x share, width]."""
        return torch.empty(1, round(tokens * self.share), self.width, dtype=self.dtype, device=device, **options)


class PipelineRunner:
    """The stages of one process.

    Args:
        modules: stage number -> module; all processes along `axis` together hold stages 0 to `num_stages` - 1.
        schedule: gpipe, 1f1b, interleaved or zbv.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        num_stages: int,
        axis: Axis,
        schedule: str,
        device: torch.device,
    ) -> None:
        self._modules = dict(sorted(modules.items()))
        self._num_stages = num_stages
        self._axis = axis
        self._name = schedule
        self._device = device
        self.borders: list[Border] = []
        self._built: tuple[tuple[int, int], Any] | None = None

    @property
    def described(self) -> bool:
        """Whether it is known what travels."""
        return len(self.borders) == self._num_stages - 1

    @property
    def last_rank(self) -> int:
        """The rank along the axis that holds the last stage."""
        return rank_of_stage(self._name, self._num_stages - 1, self._axis.size)

    @torch.no_grad()
    def describe(self, tokens: int) -> None:
        """Find out what travels, with one forward pass of micro-batch 0, which has `tokens` tokens here.

        Stage by stage, as what a stage gives depends on what it gets: the type of a residual stream follows from the
        embedding's, from autocast and from what shards the weights. Draws nothing from the generators of the caller.
        """
        devices = [] if self._device.type == "cpu" else [self._device]
        for stage in range(self._num_stages - 1):
            facts = torch.zeros(3, dtype=torch.int64, device=self._device)
            if stage in self._modules:
                received = self.borders[-1].tensor(tokens, self._device).zero_() if stage else _number(0)
                with torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"):
                    states = self._modules[stage](received, _number(0))
                facts.copy_(torch.tensor([states.shape[1], states.shape[2], _DTYPES.index(states.dtype)]))
            owner = rank_of_stage(self._name, stage, self._axis.size)
            dist.broadcast(facts, group=self._axis.group, group_src=owner)
            travelling, width, dtype = facts.tolist()
            self.borders.append(Border(travelling / tokens, width, _DTYPES[dtype]))

    def train(self, count: int, tokens: int) -> None:
        """Run `count` micro-batches of `tokens` tokens forward and backward; gradients are added up, unscaled."""
        schedule = self._schedule(count, tokens)
        numbers = torch.arange(count)
        arguments = (numbers,) if 0 in self._modules else ()
        target = numbers if self._num_stages - 1 in self._modules else None
        schedule.step(*arguments, target=target, return_outputs=False, number=numbers)
        self._count_traffic(count, tokens, backward=True)

    @torch.no_grad()
    def evaluate(self, number: int, tokens: int) -> None:
        """Run one micro-batch forward through all stages."""
        states = _number(number)
        for stage, module in self._modules.items():
            if stage and stage - 1 not in self._modules:
                states = self.borders[stage - 1].tensor(tokens, self._device)
                dist.recv(states, group=self._axis.group, group_src=self._rank_of(stage - 1))
            states = module(states, _number(number))
            if stage + 1 < self._num_stages and stage + 1 not in self._modules:
                dist.send(states, group=self._axis.group, group_dst=self._rank_of(stage + 1))
        self._count_traffic(1, tokens, backward=False)

    def _rank_of(self, stage: int) -> int:
        return rank_of_stage(self._name, stage, self._axis.size)

    def _schedule(self, count: int, tokens: int) -> Any:
        """PyTorch's schedule for this many micro-batches of this length; the last one is kept."""
        if self._built is not None and self._built[0] == (count, tokens):
            return self._built[1]
        self._built = None  # its buffers, before there are new ones
        stages = [
            PipelineStage(
                module,
                stage,
                self._num_stages,
                self._device,
                input_args=self._travels(stage - 1, tokens),
                output_args=self._travels(stage, tokens),
                group=self._axis.group,
            )
            for stage, module in self._modules.items()
        ]
        name = schedule_for(self._name, count, self._num_stages)
        only = name in ("gpipe", "1f1b")
        schedule = SCHEDULES[name](
            stages[0] if only else stages,
            n_microbatches=count,
            loss_fn=_as_it_is,
            scale_grads=False,
        )
        self._built = ((count, tokens), schedule)
        return schedule

    def _travels(self, border: int, tokens: int) -> torch.Tensor:
        """What goes in before stage 0, over a border, and out of the last stage."""
        if border < 0:
            return torch.empty(1, dtype=torch.int64, device="meta")
        if border == self._num_stages - 1:
            return torch.empty((), device="meta", requires_grad=True)
        return self.borders[border].tensor(tokens, "meta", requires_grad=True)

    def _count_traffic(self, count: int, tokens: int, *, backward: bool) -> None:
        """What this process sent: hidden states to the next stages, their gradients to those before."""
        for stage in self._modules:
            ways = [(stage, stage + 1)] if stage + 1 < self._num_stages else []
            ways += [(stage - 1, stage - 1)] if stage and backward else []
            for border, to in ways:
                if to not in self._modules:
                    sent = self.borders[border].tensor(tokens, "meta")
                    for _ in range(count):
                        TRAFFIC.count(self._axis.name, "send", sent.numel() * sent.element_size())


def _as_it_is(loss: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return loss


def _number(number: int) -> torch.Tensor:
    return torch.tensor([number])
