"""Writes a spread model, or its adapter, as files that anyone can load, gathered on rank 0 a few tensors at a time.

A whole model goes into safetensors files of bounded size with an index, under the names and in the form that its
authors' checkpoints have (experts apart, say): transformers' conversions are undone for just the tensors that belong
together, so rank 0 never holds more than one file. A disk that refuses is told after all tensors have been passed, so
that no process waits for one that has stopped.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    apply_converters,
    dot_natural_key,
    revert_weight_conversion,
)
from transformers.dynamic_module_utils import custom_object_save

from swift.distributed.gathering import Gathered, Gathering
from swift.distributed.process_group import ProcessGroup
from swift.models.adapters import CONFIG_FILE, WEIGHTS_FILE
from swift.models.fill import file_name, is_adapter
from swift.models.quiet import quiet_transformers

MAX_FILE_BYTES = 5 << 30


def write_model(
    chunks: list[PreTrainedModel],
    folder: Path,
    group: ProcessGroup,
    *,
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
    gather: Callable[[Mapping[str, torch.Tensor], ProcessGroup], Gathered] = Gathering,
) -> None:
    """Write a fully trained model; every process calls it with the pieces of the model that it holds.

    Args:
        chunks: the Hugging Face models of this process, whose parts of other processes are identity modules.
        dtype: of the floating-point tensors in the files.
        max_file_bytes: a file is closed before it would become larger, unless what belongs together is.
        gather: how tensors come to rank 0 as a whole.
    """
    model = chunks[0]
    tied = {target for chunk in chunks for target in chunk.all_tied_weights_keys}
    ignored = set(model._keys_to_ignore_on_save or ())
    tensors = {
        name: tensor
        for chunk in chunks
        for name, tensor in chunk.state_dict(keep_vars=True).items()
        if name not in tied and name not in ignored
    }
    gathering = gather(tensors, group)
    files = _Files(folder, max_file_bytes) if group.main else None
    trouble: Exception | None = None
    for names in _together(model, list(gathering.found)):
        parts = {name: gathering.whole(name) for name in names}
        if files is None or trouble is not None:
            continue
        try:
            whole = {name: _cast(part, dtype) for name, part in parts.items() if part is not None}
            del parts
            files.add(revert_weight_conversion(model, whole))
        except Exception as error:  # the others go on sending; told when they have finished
            trouble = error
    if trouble is not None:
        raise trouble
    if files is not None:
        files.close()
        _write_settings(model, folder, dtype)


def write_adapter(
    wholes: list[peft.PeftModel], folder: Path, group: ProcessGroup, *, adapter_name: str = "default"
) -> None:
    """Write an adapter in peft's format; every process calls it with the pieces of the model that it holds."""
    tensors = {
        name: parameter
        for whole in wholes
        for name, parameter in whole.named_parameters()
        if is_adapter(name) or f".modules_to_save.{adapter_name}." in name
    }
    gathering = Gathering(tensors, group)
    whole = {file_name(name): gathering.whole(name) for name in sorted(gathering.found, key=dot_natural_key)}
    if not group.main:
        return
    config = copy.deepcopy(wholes[0].peft_config[adapter_name])
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(wholes[0].get_base_model(), "name_or_path", None) or None
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t for name, t in whole.items() if t is not None}, folder / WEIGHTS_FILE, {"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(folder.stat().st_mode & 0o666)
    config.save_pretrained(str(folder))
    assert (folder / CONFIG_FILE).is_file()


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _together(model: PreTrainedModel, names: list[str]) -> Iterator[list[str]]:
    """Names in the order of layers, those that one conversion makes file tensors of together."""
    steps = [
        step for step in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(step, PrefixChange)
    ]
    reverse = [step.reverse_transform() for step in steps[::-1]]
    converters = [step for step in reverse if isinstance(step, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=dot_natural_key):
        groups.setdefault(apply_converters(name, converters)[0], []).append(name)
    yield from groups.values()


class _Files:
    """Safetensors files that are closed at a size, and an index if there are several."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._open: dict[str, torch.Tensor] = {}
        self._bytes, self._total = 0, 0
        self._written: list[tuple[Path, list[str]]] = []

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if self._open and self._bytes + size > self._max_bytes:
            self._write()
        self._open |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        self._bytes += size
        self._total += size

    def close(self) -> None:
        self._write()
        count = len(self._written)
        places: dict[str, str] = {}
        for number, (path, names) in enumerate(self._written, 1):
            final = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self._folder / final)
            places |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(places.items()))}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        path = self._folder / f"part-{len(self._written):05d}.safetensors"
        # parts of one tensor share memory, which the format doesn't know
        tensors = {name: t.clone() if t.untyped_storage().nbytes() > t.nbytes else t for name, t in self._open.items()}
        save_file(tensors, path, {"format": "pt"})
        path.chmod(self._folder.stat().st_mode & 0o666)
        self._written.append((path, list(tensors)))
        self._open, self._bytes = {}, 0


def _write_settings(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """What `save_pretrained` writes beside the weights."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    with quiet_transformers():
        if model.is_remote_code():
            custom_object_save(model, str(folder), config=config)
        config.save_pretrained(str(folder))
        if model.can_generate():
            model.generation_config.save_pretrained(str(folder))
