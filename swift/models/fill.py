"""Gives an empty, wrapped, cut and sharded model its numbers: each process reads its own part of every weight.

What a process holds of a parameter is known from the parameter itself (`pieces_of`), so nothing here depends on how the
model was spread. Boxes are read in blocks of bounded size straight into the parameters' own memory; beside the shard,
only one block is in memory. New adapters start from the same numbers whatever the layout: they are drawn layer by layer
in the order of the whole model, and each process keeps its part.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedModel

from swift.config.model import ModelConfig
from swift.config.tuner import TunerConfig
from swift.core.errors import ModelError, UsageError
from swift.distributed.pieces import pieces_of
from swift.distributed.spread import local_tensor
from swift.models.empty import build_empty_model
from swift.models.kinds import CAUSAL_LM, Task, draw_fresh, may_be_fresh, note_fresh
from swift.models.loading import check_loaded
from swift.models.prepare import seed_everything
from swift.models.stored import Converted, Stored, open_tensors, open_weights
from swift.models.tuners import apply_tuner

BLOCK_BYTES = 64 << 20
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
_WRAPPERS = re.compile(r"\.base_layer(?=\.|$)|\.original_module(?=\.|$)|\.modules_to_save\.[^.]+")
_ADAPTER = re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)\.")


@dataclass(frozen=True)
class Start:
    """Where the numbers of a run's model come from.

    Attributes:
        path: folder with the weights.
        model: the settings that the model was built with, `adapters` among them.
        tuner: what is trained; seed: of new adapters and of a new head.
        dtype: of the frozen or fully trained weights; new adapters are drawn in it, as peft does.
        task: what the model is for.
    """

    path: Path
    model: ModelConfig
    tuner: TunerConfig
    seed: int
    dtype: torch.dtype
    task: Task = CAUSAL_LM


@torch.no_grad()
def fill_model(module: nn.Module, causal_lm: PreTrainedModel, start: Start, *, device: str | torch.device) -> None:
    """Allocate what this process holds of a model on the meta device, and read or draw its numbers.

    Every process calls it once, after the model was given its final form; no process waits for another. Afterwards each
    parameter (a DTensor or not) has the numbers that `load_model`, `seed_everything` and `apply_tuner` give in one
    process, rounded to the parameter's own dtype, and each buffer is as a normally loaded model's.

    Args:
        module: the outermost module, which `fully_shard` saw; causal_lm: the Hugging Face model inside.
        device: where parameters and buffers go.

    Raises:
        ModelError: weights that are missing, damaged or of the wrong shape: on every process, even if it needs none of
            them.
        UsageError: an adapter whose start depends on the base weights.
    """
    allocate(module, torch.device(device))
    whole = build_empty_model(start.path, start.model, dtype=start.dtype, attn_implementation="eager", task=start.task)
    read_weights(causal_lm, start.path, whole, seed=start.seed)
    if start.tuner.tuner_type != "full":
        _fill_adapters(causal_lm, whole, start)
    _fill_buffers(causal_lm)


@torch.no_grad()
def read_weights(causal_lm: PreTrainedModel, path: Path, whole: PreTrainedModel, *, seed: int | None = None) -> None:
    """Read this process's part of every weight (not of adapters) into the memory of `causal_lm`.

    Args:
        whole: the same model without adapters, uncut, on the meta device.
        seed: of a head that the checkpoint may lack; None: it must hold everything.
    """
    with open_weights(path, whole) as weights:
        fresh = _fresh(whole, weights.tensors, seed) if seed is not None else {}
        weights.tensors |= fresh
        note_fresh(causal_lm, list(fresh))
        _check(path, whole, weights.tensors, weights.unexpected)
        tied = whole.all_tied_weights_keys
        for target, source in tied.items():
            if target in weights.tensors and source in weights.tensors:
                _check_tie(path, target, weights.tensors[target], weights.tensors[source])
        for name, tensors in _by_plain_name(causal_lm).items():
            source = name if name in weights.tensors else tied.get(name, name)
            if source not in weights.tensors:  # the other of two tied names, or a buffer that may be missing
                source = next((target for target, kept in tied.items() if kept == name), source)
            if source in weights.tensors:
                for tensor in tensors:
                    copy_pieces(weights.tensors[source], tensor)


def _fresh(whole: PreTrainedModel, stored: dict[str, Stored], seed: int) -> dict[str, Stored]:
    """What `load_model` draws for the parameters of a new head, rounded as it is there."""

    def of(name: str, tensor: torch.Tensor) -> Stored:
        shape = tuple(tensor.shape)
        return Converted(lambda: draw_fresh(name, shape, whole.config, seed).to(tensor.dtype), shape)

    missing = {name: t for name, t in whole.state_dict().items() if name not in stored and may_be_fresh(whole, name)}
    return {name: of(name, tensor) for name, tensor in missing.items()}


def copy_pieces(stored: Stored, tensor: torch.Tensor) -> None:
    """Read into a tensor what this process holds of it."""
    local = local_tensor(tensor.detach())
    for piece in pieces_of(tensor):
        view = piece.view(local)
        for offset, length in _blocks(piece.sizes, local.element_size()):
            if not piece.sizes:
                view.copy_(stored.read([]))
                continue
            box = [(piece.offsets[0] + offset, length), *zip(piece.offsets[1:], piece.sizes[1:], strict=True)]
            view.narrow(0, offset, length).copy_(stored.read(box))
    stored.release()


def _blocks(sizes: tuple[int, ...], element_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges along the first dimension of at most `BLOCK_BYTES` each (or of one row)."""
    if not sizes:
        yield 0, 1
        return
    rows = max(1, BLOCK_BYTES // max(1, element_bytes * math.prod(sizes[1:])))
    for offset in range(0, sizes[0], rows):
        yield offset, min(rows, sizes[0] - offset)


def plain_name(name: str) -> str:
    """The name that a tensor has in a model without adapters: without what peft's wrappers put into it."""
    return _WRAPPERS.sub("", name)


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter's own tensor."""
    return bool(_ADAPTER.search(f"{name}."))


def _by_plain_name(causal_lm: PreTrainedModel) -> dict[str, list[torch.Tensor]]:
    """Every tensor of the model that a checkpoint holds, adapters aside."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in causal_lm.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and not is_adapter(name):
            known = found.setdefault(plain_name(name), [])
            if not any(tensor is other for other in known):
                known.append(tensor)
    return found


def _check(path: Path, whole: PreTrainedModel, stored: dict[str, Stored], unexpected: set[str]) -> None:
    """Refuse what `load_model` refuses: looked at for the whole model, so all processes agree."""
    tied = whole.all_tied_weights_keys
    expected = {name: tuple(tensor.shape) for name, tensor in whole.state_dict().items()}
    may_miss = [re.compile(pattern) for pattern in whole._keys_to_ignore_on_load_missing or ()]
    missing = {
        name
        for name in expected
        if name not in stored
        and tied.get(name) not in stored
        and not any(kept == name and target in stored for target, kept in tied.items())
        and not any(pattern.search(name) for pattern in may_miss)
    }
    mismatched = {name for name, tensor in stored.items() if tuple(tensor.shape) != expected.get(name)}
    check_loaded(path, {"missing_keys": missing, "mismatched_keys": mismatched, "unexpected_keys": unexpected})


def _check_tie(path: Path, name: str, one: Stored, other: Stored) -> None:
    """A file may hold a tied matrix twice, then both copies must be equal."""
    for offset, length in _blocks(one.shape, 4):
        box = [(offset, length), *((0, size) for size in one.shape[1:])]
        if not torch.equal(one.read(box), other.read(box)):
            raise ModelError(
                f"the model in {path} ties {name} to another matrix, and its files hold two different ones",
                fix='write "tie_word_embeddings": false into its config.json',
            )


def allocate(module: nn.Module, device: torch.device) -> None:
    """Memory without numbers for all parameters and buffers; each parameter stays the object that it is.

    So what is tied, here or with another module, stays tied.
    """
    attributes = [(parameter, vars(parameter).copy()) for parameter in module.parameters()]
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.to_empty(device=device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    for parameter, known in attributes:
        vars(parameter).update(known)


def _fill_buffers(causal_lm: PreTrainedModel) -> None:
    """Recompute the buffers that no checkpoint holds, as `from_pretrained` does: each model knows how to."""
    for tensor in causal_lm.state_dict(keep_vars=True).values():
        if isinstance(tensor, torch.Tensor):
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    for part in causal_lm.modules():
        part._is_hf_initialized = not part._non_persistent_buffers_set  # type: ignore[assignment]
    causal_lm.initialize_weights()


def _fill_adapters(causal_lm: PreTrainedModel, whole: PreTrainedModel, start: Start) -> None:
    own: dict[str, torch.Tensor] = {
        name: parameter for name, parameter in causal_lm.named_parameters() if is_adapter(name)
    }
    wrapped = apply_tuner(whole, start.tuner, adapters=start.model.adapters, fast_lora=False)
    assert isinstance(wrapped, peft.PeftModel)
    config = wrapped.peft_config["default"]
    check_start(config)
    if start.model.adapters:
        read_adapter(causal_lm, Path(start.model.adapters[0]).expanduser())
        return
    seed_everything(start.seed)
    missing = set(own)
    for name, values in _draw(whole, config):
        if name in own:
            missing.discard(name)
            local = local_tensor(own[name].detach())
            for piece in pieces_of(own[name]):
                box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
                piece.view(local).copy_(values[box])
    if missing:
        raise ModelError(f"no start is known for {', '.join(sorted(missing)[:3])}", where="--tuner_type")


def check_start(config: Any) -> None:
    """Refuse adapters whose first numbers come from base weights, which no process holds whole.

    Raises:
        UsageError: names the flag.
    """
    refusals = {
        "--tuner_type": config.peft_type != peft.PeftType.LORA and str(config.peft_type.value).lower(),
        "--use_dora": getattr(config, "use_dora", False) and "DoRA's magnitudes",
        "--init_weights": getattr(config, "init_lora_weights", True) not in _PLAIN_STARTS
        and f"a start by {getattr(config, 'init_lora_weights', True)}",
        "--new_special_tokens": getattr(config, "trainable_token_indices", None) and "training rows of new tokens",
    }
    for flag, what in refusals.items():
        if what:
            raise UsageError(
                f"{what} is not possible with a model that is spread over processes",
                where=flag,
                fix="use plain LoRA or full tuning, or train without sharding",
            )


def _draw(whole: PreTrainedModel, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The adapter's parameters by name, from today's random state, a layer at a time.

    Each layer of the base is stood in for by an empty one on the host (whose memory is never touched), alone under its
    own name, and peft adds an adapter to it, in the order in which it adds them to the whole model: those on layers,
    then those on parameters, such as the matrices of experts.
    """
    layers = {path: layer for path, layer in whole.named_modules() if isinstance(layer, LoraLayer)}
    on_parameters = {path for path, layer in layers.items() if isinstance(layer, ParamWrapper)}
    plain, of_experts = copy.deepcopy(config), copy.deepcopy(config)
    plain.modules_to_save = of_experts.modules_to_save = None
    plain.target_parameters, of_experts.target_modules = None, []
    for path in [path for path in layers if path not in on_parameters]:
        yield from _draw_one(path, layers[path], plain)
    for path in [path for path in layers if path in on_parameters]:
        if path.rpartition(".")[0] not in on_parameters:  # one inside another is drawn with that
            yield from _draw_one(path, layers[path], of_experts)


def _draw_one(path: str, layer: LoraLayer, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    stand = nn.Module()
    parent = stand
    *outer, last = path.split(".")
    for name in outer:
        parent.add_module(name, nn.Module())
        parent = parent.get_submodule(name)
    parent.add_module(last, copy.deepcopy(layer.get_base_layer()).to_empty(device="cpu"))
    peft.inject_adapter_in_model(copy.deepcopy(config), stand)
    yield from ((name, parameter.data) for name, parameter in stand.named_parameters() if is_adapter(name))


def file_name(name: str) -> str:
    """The name that peft gives a tensor of the adapter "default" in a file; `name` is that of the wrapped model."""
    return name.replace(".modules_to_save.default", "").replace(".default", "")


def read_adapter(causal_lm: PreTrainedModel, folder: Path) -> None:
    """Read this process's part of a saved adapter, of which `apply_tuner` has seen that it fits the whole model."""
    with ExitStack() as stack:
        name = "adapter_model.safetensors"
        file = folder / (name if (folder / name).is_file() else "adapter_model.bin")
        stored = dict(open_tensors(file, stack))
        for key, parameter in causal_lm.named_parameters():
            if is_adapter(key) or ".modules_to_save." in key:
                copy_pieces(stored[file_name(f"base_model.model.{key}")], parameter)
