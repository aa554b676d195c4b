"""New weights for an engine in another process, by way of files: safetensors that it reads itself.

Files work between any two programs on one machine, on a CPU and on GPUs alike, and hold nothing that runs when read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from swift.core.errors import ModelError

if TYPE_CHECKING:
    import torch

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a model's parameters by their names in its files."""

_FILE_BYTES = 2 * 2**30


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights in the safetensors files of a model's folder, read from their heads.

    Raises:
        ModelError: there are none.
    """
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            entries = json.loads(opened.read(length))
        found.update({name: tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"})
    if not found:
        raise ModelError("the model's folder has no safetensors files", where=str(folder))
    return found


def write_weights(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, shapes: Shapes) -> set[str]:
    """Write weights into files of a few GiB.

    Args:
        tensors: names as in the model's files, and values on any device.
        folder: exists and is empty.
        shapes: what names and shapes may be.

    Returns:
        The names.

    Raises:
        ModelError: a name or a shape that the model doesn't have.
    """
    from safetensors.torch import save_file

    given: set[str] = set()
    held: dict[str, torch.Tensor] = {}
    size = files = 0

    def write() -> None:
        nonlocal held, size, files
        files += 1
        save_file(held, folder / f"weights-{files:05d}.safetensors")
        held, size = {}, 0

    for name, tensor in tensors:
        if name not in shapes:
            raise ModelError(f"the model has no weight {name}")
        if tuple(tensor.shape) != shapes[name]:
            raise ModelError(f"{name} is {list(shapes[name])}, and {list(tensor.shape)} was given")
        value = tensor.detach().cpu().contiguous()
        held[name] = value.clone() if value.data_ptr() == tensor.data_ptr() else value  # two names may share one
        given.add(name)
        size += value.nbytes
        if size >= _FILE_BYTES:
            write()
    if held:
        write()
    return given
