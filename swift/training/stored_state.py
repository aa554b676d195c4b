"""What a checkpoint keeps for a continuation, read back by a process: all of it, or the parts that the process holds.

It may have been written by one process (`TRAINED_FILE` and the optimizer's state in one file) or by many
(`swift.checkpoint.sharded`); who reads it may hold whole tensors or parts. Any goes with any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from swift.checkpoint.sharded import describe_sharded, is_sharded, load_sharded
from swift.core.errors import CheckpointError
from swift.distributed.pieces import pieces_of
from swift.distributed.spread import local_tensor
from swift.models.fill import copy_pieces
from swift.models.stored import open_tensors
from swift.optim.local import LocalParameters

TRAINED_FILE = "trained_state.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
RANDOM_FILE = "random_state.pt"

_OTHER_SETTINGS = "resume with the model and tuner settings that the run was started with"


def read_trained(
    folder: Path, local: LocalParameters, aliases: Mapping[str, str], load_public: Callable[[Path], None]
) -> None:
    """Read what a process holds of the trained tensors from a checkpoint's private part, of whatever layout.

    Raises:
        CheckpointError: it lacks tensors, or has them in other shapes.
    """
    own = {name: parameter.detach() for name, parameter in local.named_whole()}
    if is_sharded(folder):
        if not any(name.startswith("model.") for name in describe_sharded(folder)):
            load_public(folder)
            return
        # two names may be read from one: the second copy of a tied matrix
        for names in ({n for n in own if n not in aliases}, {n for n in own if n in aliases}):
            load_sharded(folder, {f"model.{aliases.get(name, name)}": own[name] for name in names})
        return
    with ExitStack() as stack:
        stored = dict(open_tensors(folder / TRAINED_FILE, stack))
        wrong = [
            n
            for n, t in own.items()
            if (s := stored.get(aliases.get(n, n))) is None or tuple(s.shape) != tuple(t.shape)
        ]
        if wrong:
            raise CheckpointError(
                f"the checkpoint's trained tensors don't match this model: {', '.join(wrong[:4])}",
                where=str(folder),
                fix=_OTHER_SETTINGS,
            )
        for name, tensor in own.items():
            copy_pieces(stored[aliases.get(name, name)], tensor)


def read_optimizer(
    folder: Path, optimizer: torch.optim.Optimizer, local: LocalParameters, aliases: Mapping[str, str]
) -> dict[str, Any]:
    """Put an optimizer's state back from a checkpoint of whatever layout: what belongs to this process's parts.

    Returns:
        What else the optimizer's file holds, `scaler` among it.

    Raises:
        CheckpointError: weights only, or the state of other parameters.
    """
    if not (folder / OPTIMIZER_FILE).is_file():
        raise CheckpointError(
            "the checkpoint holds weights only (it was saved with --save_only_model)",
            where=str(folder),
            fix="add --resume_only_model true to start new steps from its weights",
        )
    saved = torch.load(folder / OPTIMIZER_FILE, weights_only=True, map_location="cpu", mmap=True)
    groups = saved["groups"] if "groups" in saved else saved["optimizer"]["param_groups"]
    known = {name for group in groups for name in group["names"]}
    parts, wholes = dict(local.named()), dict(local.named_whole())
    names = {name: aliases.get(name, name) for name in parts}
    if not set(names.values()) <= known:
        raise CheckpointError(
            "the saved optimizer state is of other parameters",
            where=str(folder),
            fix="resume with the optimizer and tuner settings of the run, or add --resume_only_model true",
        )
    if "groups" in saved:
        _read_spread_state(folder, optimizer, local, names)
    else:
        numbers = {name: i for g in groups for name, i in zip(g["names"], g["params"], strict=True)}
        for name, source in names.items():
            entries = saved["optimizer"]["state"].get(numbers[source])
            if entries is not None:
                part, whole = parts[name], wholes[name]
                optimizer.state[part] = {key: _part(value, whole, part) for key, value in entries.items()}
    for group in optimizer.param_groups:  # today's rates, betas and decay hold; what only the optimizer knows goes on
        theirs = next(g for g in groups if aliases.get(group["names"][0], group["names"][0]) in g["names"])
        group.update({key: value for key, value in theirs.items() if key not in group})
    return saved


def _read_spread_state(
    folder: Path, optimizer: torch.optim.Optimizer, local: LocalParameters, names: Mapping[str, str]
) -> None:
    known = describe_sharded(folder)
    parts, wholes = dict(local.named()), dict(local.named_whole())
    keys: dict[str, dict[str, tuple]] = {}
    for entry, facts in known.items():
        if entry.startswith("optimizer."):
            name, _, key = entry.removeprefix("optimizer.").rpartition(".")
            keys.setdefault(name, {})[key] = facts
    for name, source in names.items():
        state: dict[str, torch.Tensor] = {}
        for key, (shape, dtype) in keys.get(source, {}).items():
            like = shape == tuple(wholes[name].shape)
            place = parts[name].device if like else "cpu"
            state[key] = torch.zeros(parts[name].shape if like else shape, dtype=dtype, device=place)
        if state:
            load_sharded(folder, {f"optimizer.{source}.{k}": local.like_parameter(name, v) for k, v in state.items()})
            optimizer.state[parts[name]] = state


def _part(value: Any, whole: torch.Tensor, part: torch.Tensor) -> Any:
    """This process's part of a state tensor of one process's run; other values as they are."""
    if not isinstance(value, torch.Tensor) or value.shape != whole.shape or not whole.ndim:
        return value.clone() if isinstance(value, torch.Tensor) else value
    mine = torch.zeros(part.shape, dtype=value.dtype, device=part.device)
    for piece in pieces_of(whole):
        box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
        piece.view(local_tensor(mine)).copy_(value[box])
    return mine
