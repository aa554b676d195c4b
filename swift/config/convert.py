"""Configuration files of ms-swift, LLaMA-Factory and Axolotl -> ours, with a list of what has no equivalent.

The converted file trains the same thing: where the other tool's default differs from ours, its default is written
out. The other tools' names are in a file of their own each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swift.config import commands as classes
from swift.config.conversion import Conversion
from swift.config.convert_axolotl import METHODS as AXOLOTL_METHODS
from swift.config.convert_axolotl import convert_axolotl
from swift.config.convert_llamafactory import convert_llamafactory
from swift.config.files import CONFIG_NAME, ConfigFile, read_config_file
from swift.config.resolve import group_spellings
from swift.config.schema import names_of
from swift.core.errors import UsageError

TOOLS = ("ms-swift", "llamafactory", "axolotl")


def convert_file(path: str | Path, *, tool: str = "auto", command: str | None = None) -> Conversion:
    """Convert a file.

    Args:
        path: the other tool's YAML or JSON file.
        tool: one of `TOOLS`, or `auto` to tell by the keys.
        command: our command; by default what the file is for.

    Raises:
        UsageError: the file can't be read, is a shell script, or it isn't clear which tool it belongs to.
    """
    file = read_foreign_file(path)
    data = {key: value for key, value in file.data.items() if key != "ENV"}
    tool = detect_tool(data, file.path) if tool == "auto" else tool
    convert: Callable[[dict[str, Any], Conversion], None] = {
        "ms-swift": convert_ms_swift,
        "llamafactory": convert_llamafactory,
        "axolotl": convert_axolotl,
    }[tool]
    result = Conversion(tool, command or _command_of(tool, data), file.path.parent, env=file.env)
    convert(data, result)
    return result


def read_foreign_file(path: str | Path) -> ConfigFile:
    """Parse a file to convert.

    Raises:
        UsageError: as `read_config_file`; also for a shell script, which holds a command line.
    """
    if Path(path).suffix in (".sh", ".bash") and Path(path).is_file():
        raise UsageError(
            f"{path} is a shell script, not a file of settings",
            fix="run the script itself: its flags are understood (or paste its flags after `swift config show`)",
        )
    return read_config_file(path)


def is_own_file(file: ConfigFile) -> bool:
    """Whether a file is one of ours: left behind by a run, or grouped as no other tool's files are."""
    if file.path.name == CONFIG_NAME:
        return True
    for cls in (classes.SftConfig, classes.RlhfConfig, classes.InferConfig, classes.MergeLoraConfig):
        groups, names = group_spellings(cls), names_of(cls)
        for key, members in file.data.items():
            if isinstance(members, dict) and key in groups:
                return all(word in names or groups[key] + word in names for word in map(str, members))
    return False


_MARKS: dict[str, tuple[str, ...]] = {
    "llamafactory": (
        *("stage", "finetuning_type", "cutoff_len", "lora_target", "dataset_dir", "template", "val_size", "do_train"),
        *("overwrite_cache", "flash_attn", "model_name_or_path", "export_dir", "neat_packing"),
    ),
    "axolotl": (
        *("base_model", "adapter", "datasets", "sequence_len", "sample_packing", "micro_batch_size", "lora_r"),
        *("val_set_size", "num_epochs", "lr_scheduler", "optimizer", "lora_target_linear", "dataset_prepared_path"),
    ),
    "ms-swift": (
        *("model", "model_id_or_path", "tuner_type", "train_type", "sft_type", "target_modules", "max_length"),
        *("split_dataset_ratio", "torch_dtype", "attn_impl", "lora_rank", "rlhf_type", "model_author", "system"),
    ),
}


def detect_tool(data: Mapping[str, Any], path: Path) -> str:
    """The tool whose own words a file uses most.

    Raises:
        UsageError: if two tools fit equally well, or none.
    """
    scores = {tool: sum(mark in data for mark in marks) for tool, marks in _MARKS.items()}
    best = max(scores.values())
    winners = [tool for tool, score in scores.items() if score == best]
    if best == 0 or len(winners) > 1:
        raise UsageError(
            f"{path} could belong to {' or '.join(winners) if best else 'none of the known tools'}",
            fix=f"say which: --from {'|'.join(TOOLS)}",
        )
    return winners[0]


def _command_of(tool: str, data: Mapping[str, Any]) -> str:
    if tool == "llamafactory":
        if "export_dir" in data:
            return "merge-lora"
        if data.get("stage") is None and not data.get("do_train"):
            return "infer"
        return {"pt": "pt", "dpo": "rlhf", "kto": "rlhf", "rm": "rlhf"}.get(str(data.get("stage")), "sft")
    if tool == "axolotl":
        if data.get("rl") in AXOLOTL_METHODS or data.get("reward_model"):
            return "rlhf"
        datasets = data.get("pretraining_dataset") or [
            d for d in data.get("datasets") or [] if isinstance(d, dict) and d.get("type") == "completion"
        ]
        return "pt" if datasets else "sft"
    if data.get("rlhf_type"):
        return "rlhf"
    return "pt" if data.get("use_chat_template") is False else "sft"


def convert_ms_swift(data: dict[str, Any], out: Conversion) -> None:
    """ms-swift's names are ours; a few defaults and the unavailable settings differ."""
    flat: dict[str, Any] = {}
    for key, value in data.items():  # its files are flat; ours may be grouped, and are read as well
        if isinstance(value, dict) and key not in names_of(classes.SftConfig):
            flat.update(value)
        else:
            flat[key] = value
    out.take_lost(flat, {"load_args": "training starts from its own settings", "local_repo_path": "not needed"})
    out.take_satisfied(flat, {"ignore_args_error": "unknown settings are refused"})
    template = flat.pop("template", flat.pop("template_type", None))
    if template not in (None, "auto", "AUTO", "default", "chatml"):
        out.ignore("template", f"the tokenizer's own chat template is used, not {template}")
    elif template == "chatml":
        out.set("template", "chatml")
    out.take_rest(flat)
    out.default("strict", False, "ms-swift")
    _ms_swift_methods(out)
    _ms_swift_environment(out)


def _ms_swift_methods(out: Conversion) -> None:
    """What it takes for methods where nothing is said, and we take otherwise."""
    method = out.values.get("rlhf_type", "dpo") if out.command == "rlhf" else None
    if method == "simpo":
        out.default("cpo_alpha", 1.0, "ms-swift")
    if method == "gkd":
        out.default("distill_temperature", out.values.get("temperature", 0.9), "ms-swift")
        if "gkd_logits_topk" in out.values:
            out.default("topk_tail", "renormalise", "ms-swift")


def _ms_swift_environment(out: Conversion) -> None:
    """Settings that it reads from environment variables."""
    for name in ("MAX_POSITIVE_SAMPLES", "MAX_NEGATIVE_SAMPLES", *(n for n in out.env if n.startswith("INFONCE_"))):
        if name in out.env and name.lower() in out.settings:
            out.set(name.lower(), out.env.pop(name), key=name)
