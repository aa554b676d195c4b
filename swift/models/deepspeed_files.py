"""Checkpoints that DeepSpeed wrote, here or in another program, as a model that anyone can load.

Ranks' files together hold the fp32 weights; DeepSpeed's own reader puts them together. The files are pickles, which
run code when they are read: only files of one's own making are safe.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from swift.config.model import ModelConfig
from swift.config.saved import DEEPSPEED_FOLDER
from swift.core.errors import CheckpointError, UsageError, first_line
from swift.core.extras import require
from swift.core.files import disk_errors, fsync_tree
from swift.core.logging import get_logger
from swift.models.loading import load_model, load_tokenizer
from swift.models.quiet import quiet_transformers

log = get_logger()
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# what programs call the model inside of the module that DeepSpeed has
_PREFIXES = ("", "model.", "module.", "module.model.", "_forward_module.", "_forward_module.model.")


def find_state(folder: Path) -> Path:
    """The folder with ranks' files: `folder` itself, what its file `latest` names, or those in a checkpoint of ours.

    Raises:
        UsageError: there are none.
    """
    for place in (folder, folder / DEEPSPEED_FOLDER):
        latest = place / "latest"
        if latest.is_file() and (tagged := place / latest.read_text().strip()).is_dir():
            return tagged
    if any(folder.glob("*_optim_states.pt")) or any(folder.glob("*_model_states.pt")):
        return folder
    raise UsageError(
        "there are no files of DeepSpeed's here (*_optim_states.pt), and no `latest` that names their folder",
        where=str(folder),
        fix="the folder that the program saved to, or global_step... in it",
    )


def read_fp32(folder: Path) -> dict[str, Any]:
    """The fp32 weights in a folder of ranks' files, by DeepSpeed's names of them; `.contiguous()` reads one.

    Raises:
        CheckpointError: files are missing or damaged, by name. DependencyError: DeepSpeed isn't installed.
    """
    require("deepspeed", extra="deepspeed", purpose="read its checkpoints")
    _check_files(folder)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name, lazy_mode=True)


def _check_files(folder: Path) -> None:
    """Every rank's file is there and whole."""
    found = {
        (int(match[1]), int(match[2])): path
        for path in sorted(folder.glob("*_optim_states.pt"))
        if (match := _OPTIMIZER_FILE.fullmatch(path.name))
    }
    if not found:
        raise CheckpointError(
            "the files with fp32 weights are missing: zero_pp_rank_*_mp_rank_00_optim_states.pt", where=str(folder)
        )
    if any(model_rank for _, model_rank in found):
        raise CheckpointError(
            "the checkpoint is of a run whose model was cut by tensor or pipeline parallelism (mp_rank above 0)",
            where=str(folder),
            fix="gather it in the program that wrote it",
        )
    opened = {rank: _open(path) for (rank, _), path in found.items()}
    state = next(iter(opened.values()))["optimizer_state_dict"]
    count, stage = state["partition_count"], state["zero_stage"]
    world_size = max(count) if isinstance(count, list) else count
    like = next(iter(found.values())).name
    wanted = [re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", like) for rank in range(world_size)]
    if stage == 3:
        wanted += [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(world_size)]
    else:
        wanted.append("mp_rank_00_model_states.pt")
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"the checkpoint was written by {world_size} process(es), and {len(missing)} file(s) are missing: "
            f"{', '.join(missing[:4])}{' …' if len(missing) > 4 else ''}",
            where=str(folder),
            fix="copy the files of every machine here",
        )
    for name in wanted:
        if name.endswith("_model_states.pt"):
            _open(folder / name)


def _open(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"{path.name} is damaged or incomplete: {first_line(error)}", where=str(path.parent), fix="copy it again"
        ) from error


def convert_checkpoint(
    folder: Path, base: Path, output: Path, model_config: ModelConfig, *, exist_ok: bool = False
) -> Path:
    """Write the weights of a DeepSpeed checkpoint as a model folder.

    Args:
        folder: see `find_state`.
        base: the model that was trained: configuration, tokenizer, and the weights that weren't trained.
        output: folder to make; it appears complete or not at all.
        model_config: `torch_dtype`: of the files; default: the base model's.

    Raises:
        UsageError: `output` is in the way. CheckpointError: files are missing, damaged, or of another model.
    """
    if output.exists() and any(output.iterdir()) and not exist_ok:
        raise UsageError(f"{output} exists", where="--output_dir", fix="another folder, or --exist_ok true")
    saved = read_fp32(find_state(folder))
    if any(".lora_" in name or "adapter" in name for name in saved):
        raise CheckpointError(
            "the checkpoint holds an adapter's weights, not a whole model's",
            where=str(folder),
            fix="the program that trained it wrote the adapter beside it (adapter_model.safetensors)",
        )
    tokenizer = load_tokenizer(base, model_config)
    model = load_model(base, model_config, dtype=torch.float32, tokenizer=tokenizer)
    _fill(model, saved, folder)
    dtype = getattr(torch, model_config.torch_dtype) if model_config.torch_dtype else _dtype_of(base, model_config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    aside = output.with_name(f".{output.name}.converting")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with disk_errors(aside, sum(p.numel() * p.element_size() for p in model.parameters())), quiet_transformers():
            aside.mkdir(parents=True)
            model.save_pretrained(str(aside))
            tokenizer.save_pretrained(str(aside))
        fsync_tree(aside)
        shutil.rmtree(output, ignore_errors=True)
        aside.rename(output)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return output


def _dtype_of(base: Path, config: ModelConfig) -> torch.dtype:
    from swift.models.loading import load_configuration

    dtype = load_configuration(base, config).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


@torch.no_grad()
def _fill(model: Any, saved: Mapping[str, Any], folder: Path) -> None:
    """Copy what was trained into the model, and say what stays the base model's."""
    own = dict(model.named_parameters(remove_duplicate=False))

    def known(prefix: str) -> int:
        return sum(name.startswith(prefix) and name.removeprefix(prefix) in own for name in saved)

    prefix = max(_PREFIXES, key=known)
    unknown = [n for n in saved if not (n.startswith(prefix) and n.removeprefix(prefix) in own)]
    wrong = [n for n in saved if n not in unknown and tuple(saved[n].shape) != tuple(own[n.removeprefix(prefix)].shape)]
    if unknown or wrong:
        some = unknown or wrong
        raise CheckpointError(
            f"{len(some)} of {len(saved)} tensors {'are not in' if unknown else 'have another shape than in'} the base "
            f"model: {', '.join(some[:3])}{' …' if len(some) > 3 else ''}",
            where=str(folder),
            fix="--model: the one that the run started from",
        )
    filled = set()
    for name, tensor in saved.items():
        parameter = own[name.removeprefix(prefix)]
        parameter.copy_(tensor.contiguous())
        filled.add(parameter)
    kept = [name for name, parameter in model.named_parameters() if parameter not in filled]
    if kept:
        log.info(
            "%d tensors are the base model's, the checkpoint has none for them: %s", len(kept), ", ".join(kept[:4])
        )
