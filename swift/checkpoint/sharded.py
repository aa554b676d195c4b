"""Tensors that are spread over processes, kept so that any other layout can read them.

Each process writes the boxes that it holds of each tensor (`pieces_of`) with torch.distributed.checkpoint, equal boxes
of several processes once; each process reads the boxes that it needs, whoever wrote them. The library's own planners
take one box per DTensor from its placements, which is wrong for a process's share of a packed matrix; so the plans are
made here. Knows nothing about models: a state is names and tensors.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from swift.checkpoint.store import describe_file
from swift.core.errors import CheckpointError, SwiftError
from swift.core.files import disk_error, is_disk_fault
from swift.distributed.pieces import Piece, pieces_of
from swift.distributed.spread import local_tensor

FOLDER = "spread_state"  # inside a checkpoint
_INDEX = ".metadata"

State = Mapping[str, torch.Tensor]


def is_sharded(checkpoint: Path) -> bool:
    """Whether a checkpoint's private part was written by `save_sharded`."""
    return (checkpoint / FOLDER / _INDEX).is_file()


def save_sharded(checkpoint: Path, state: State) -> dict[str, dict[str, int]]:
    """Write a state into the unfinished folder `checkpoint`; every process calls it with what it holds.

    Args:
        state: DTensors, or tensors that are equal on all processes that name them.

    Returns:
        Size and CRC-32 of the files that this process wrote, by path inside `checkpoint`.

    Raises:
        CheckpointError: a process could not write; on every process, naming it.
    """
    folder, rank = checkpoint / FOLDER, _rank()
    try:
        with _alone_too():
            dcp.save(
                dict(state),
                storage_writer=FileSystemWriter(folder, sync_files=True),
                planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=not dist.is_initialized(),
            )
    except CheckpointException as error:
        raise _told(folder, error, "written") from error
    mine = [*folder.glob(f"__{rank}_*"), *([folder / _INDEX] if rank == 0 else [])]
    return {f"{FOLDER}/{path.name}": describe_file(path) for path in mine}


def load_sharded(checkpoint: Path, state: State) -> None:
    """Overwrite the tensors of `state` (in place) with what `save_sharded` kept of them. No process waits for another.

    Raises:
        CheckpointError: a tensor is missing or has another shape, or the files can't be read.
    """
    known = describe_sharded(checkpoint)
    # of a tensor without elements nothing is kept
    wrong = [name for name, t in state.items() if t.numel() and known.get(name, (None,))[0] != tuple(t.shape)]
    if wrong:
        raise CheckpointError(
            f"the checkpoint's trained tensors don't match this model: {', '.join(sorted(wrong)[:4])}"
            + (" …" if len(wrong) > 4 else ""),
            where=str(checkpoint),
            fix="resume with the model and tuner settings that the run was started with",
        )
    folder = checkpoint / FOLDER
    try:
        with _alone_too():
            dcp.load(
                dict(state),
                storage_reader=FileSystemReader(folder),
                planner=_LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                no_dist=True,
            )
    except CheckpointException as error:
        raise _told(folder, error, "read") from error


def describe_sharded(checkpoint: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor that `save_sharded` kept, by name."""
    folder = checkpoint / FOLDER
    try:
        index = FileSystemReader(folder).read_metadata()
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
        raise CheckpointError(f"can't read {FOLDER}/{_INDEX}: {error}", where=str(checkpoint)) from error
    return {
        name: (tuple(entry.size), entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


class _SavePlanner(DefaultSavePlanner):
    """Writes every box of every tensor; the default's global plan drops all but one of equal boxes."""

    def create_local_plan(self) -> SavePlan:
        self._boxes = _boxes(self.state_dict)
        self.plan = SavePlan([_write_item(name, *box) for (name, _), box in self._boxes.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return _view(self._boxes, write_item.index)


def _write_item(name: str, tensor: torch.Tensor, piece: Piece) -> WriteItem:
    offsets, sizes = torch.Size(piece.offsets), torch.Size(piece.sizes)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(tensor.shape),
        ),
    )


class _LoadPlanner(DefaultLoadPlanner):
    """Reads into every box of every tensor."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        self._boxes = _boxes(self.state_dict)
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for (name, offsets), (_, piece) in self._boxes.items():
            chunks.setdefault(name, []).append(
                ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(piece.sizes))
            )
        items: list[ReadItem] = []
        for name, wanted in chunks.items():
            stored: Any = self.metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, stored, wanted)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return _view(self._boxes, index)


def _boxes(state: State) -> dict[tuple[str, tuple[int, ...]], tuple[torch.Tensor, Piece]]:
    """What this process holds: boxes by name and place."""
    return {(name, piece.offsets): (tensor, piece) for name, tensor in state.items() for piece in pieces_of(tensor)}


def _view(boxes: Mapping[Any, tuple[torch.Tensor, Piece]], index: MetadataIndex) -> torch.Tensor:
    assert index.offset is not None
    tensor, piece = boxes[index.fqn, tuple(index.offset)]
    return piece.view(local_tensor(tensor.detach()))


@contextmanager
def _alone_too() -> Iterator[None]:
    """A run of one process may use these files as well; the library warns of that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _told(folder: Path, error: CheckpointException, what: str) -> SwiftError:
    """The first process's failure in a line; the same on every process."""
    rank, (cause, _) = min(error.failures.items())
    if is_disk_fault(cause):
        refused = disk_error(folder, None, cause)
        return CheckpointError(f"rank {rank}: {refused.message}", where=refused.where, fix=refused.fix)
    return CheckpointError(
        f"rank {rank}: the spread state can't be {what}: {type(cause).__name__}: {cause}", where=str(folder)
    )
