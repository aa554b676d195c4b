"""One model over several processes, each with a share of every matrix: for models that don't fit one device.

The first process has the requests, the scheduler and the choice of tokens. The others have only their shares of the
model and of the cache: they are told each step, compute it together with the first one, and forget it. So they can't
come to another decision, and nothing but steps is sent: a few numbers for each token.

The model is cut as in training (`distributed.tensor`), and each process reads only its own part of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import PreTrainedModel

from swift.config.degrees import Degrees
from swift.config.tuner import TunerConfig
from swift.core.errors import ModelError
from swift.distributed.collectives import all_gather
from swift.distributed.mesh import Axis, build_mesh
from swift.distributed.process_group import start_process_group
from swift.distributed.spread import Spread, local_tensor
from swift.distributed.tensor import apply_tensor_parallel
from swift.inference.paged.runner import ModelRunner
from swift.inference.paged.sequence import Piece
from swift.inference.paged.step import Step
from swift.models.empty import build_empty_model
from swift.models.fill import Start, fill_model
from swift.models.head import find_head

_PATIENCE = timedelta(days=3650)  # the others wait for the next step, however long nobody asks anything
_STOP, _STEP, _COPY = range(3)


@dataclass(frozen=True)
class Crew:
    """The processes that run one model.

    Attributes:
        spread: how the model lies on them.
        orders: the group that steps are told through.
    """

    spread: Spread
    orders: Any

    @property
    def axis(self) -> Axis:
        """This process's place."""
        return self.spread.mesh["tp"]

    @property
    def leads(self) -> bool:
        """Whether this is the first process."""
        return self.axis.rank == 0

    def least(self, value: int) -> int:
        """The smallest of the processes' values, on all of them."""
        tensor = torch.tensor([value])
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.orders)
        return int(tensor)


def gather_crew(size: int, device_type: str) -> Crew:
    """Meet the other processes.

    Raises:
        SwiftError: they can't be reached.
    """
    start_process_group(device_type, settings={"tensor_parallel_size": size})
    mesh = build_mesh(Degrees(tp=size), device_type)
    return Crew(Spread(mesh), dist.new_group(backend="gloo", timeout=_PATIENCE))


def spread_model(crew: Crew, start: Start, device: torch.device) -> PreTrainedModel:
    """A causal language model of which this process holds its share; every process calls it.

    Raises:
        UsageError, ModelError: it can't be cut over so many processes, or its weights are missing or damaged.
    """
    model = build_empty_model(start.path, start.model, dtype=start.dtype)
    apply_tensor_parallel(model, model, crew.spread, sequence_parallel=False)
    fill_model(model, model, start, device=device)
    return model.eval()


def start_of(path: Any, config: Any, dtype: torch.dtype) -> Start:
    """Where an engine's weights come from: a folder, and nothing that is trained."""
    return Start(path, config, TunerConfig(tuner_type="full"), 0, dtype)


class SpreadRunner(ModelRunner):
    """Runs the steps of a spread model: on the first process for its caller, on the others as they are told.

    Args:
        model: made by `spread_model`, its attention implementation `paged`.
        crew: the processes.
    """

    def __init__(self, model: Any, crew: Crew) -> None:
        super().__init__(model)
        self._crew = crew
        self._head = find_head(model, axis=crew.axis)
        if not self._head.plain:
            raise ModelError(
                f"an output head of the kind {type(self._head.module).__name__} can't be cut over processes",
                where="--tensor_parallel_size",
                fix="--tensor_parallel_size 1",
            )

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece[Any]]) -> torch.Tensor:
        step, ids, positions, wanted = self._step(pieces)
        self._tell(_STEP, _packed(step, ids, positions, wanted))
        return self._logits(self._compute(step, ids, positions, wanted))

    def copy_block(self, source: int, target: int) -> None:
        self._tell(_COPY, [np.array([source, target], dtype=np.int64)])
        super().copy_block(source, target)

    @property
    def leads(self) -> bool:
        """Whether this is the first process."""
        return self._crew.leads

    def stop(self) -> None:
        """Tell the others that there will be no more steps."""
        self._tell(_STOP, [])

    @torch.inference_mode()
    def follow(self) -> None:
        """Compute what the first process tells, until it stops."""
        assert self.cache is not None
        while True:
            kind, arrays = self._hear()
            if kind == _STOP:
                return
            if kind == _COPY:
                super().copy_block(*arrays[0].tolist())
                continue
            ids, positions, slots, spans, tables, wanted = arrays
            step = Step(self.cache, len(ids), slots, _narrow(spans, 3), _narrow(tables, len(spans) // 3, whole=True))
            self._logits(self._compute(step, ids, positions, wanted.tolist()))

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> fp32 [rows, vocab], on every process."""
        module, axis = self._head.module, self._crew.axis
        if not len(rows):
            return torch.empty(0, 0, device=rows.device)
        weight: Any = module.weight
        bias: Any = module.bias
        share = functional.linear(rows, local_tensor(weight), None if bias is None else local_tensor(bias))
        width = -(-weight.shape[0] // axis.size)
        share = functional.pad(share.float(), (0, width - share.shape[1]))  # the last share may be smaller
        return self._head.transform(all_gather(share.contiguous(), axis, 1)[:, : weight.shape[0]])

    def _tell(self, kind: int, arrays: list[np.ndarray]) -> None:
        lengths = [len(array) for array in arrays]
        head = torch.tensor([kind, len(arrays), *lengths, *[0] * (6 - len(lengths))])
        dist.broadcast(head, 0, group=self._crew.orders)
        if arrays:
            dist.broadcast(torch.from_numpy(np.concatenate(arrays)), 0, group=self._crew.orders)

    def _hear(self) -> tuple[int, list[np.ndarray]]:
        head = torch.empty(8, dtype=torch.int64)
        dist.broadcast(head, 0, group=self._crew.orders)
        kind, count, *lengths = head.tolist()
        if not count:
            return kind, []
        data = torch.empty(sum(lengths[:count]), dtype=torch.int64)
        dist.broadcast(data, 0, group=self._crew.orders)
        return kind, np.split(data.numpy(), np.cumsum(lengths[: count - 1]))


def _packed(step: Step, ids: np.ndarray, positions: np.ndarray, wanted: list[int]) -> list[np.ndarray]:
    """A step as arrays of int64."""
    parts = [ids, positions, step.slots, step.spans.ravel(), step.tables.ravel(), np.array(wanted, dtype=np.int64)]
    return [part.astype(np.int64) for part in parts]


def _narrow(array: np.ndarray, size: int, *, whole: bool = False) -> np.ndarray:
    """int32 rows of `size` numbers, or (`whole`) `size` rows."""
    return array.astype(np.int32).reshape((size, -1) if whole else (-1, size))
