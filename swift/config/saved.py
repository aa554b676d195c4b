"""The configuration that every run and checkpoint folder holds, and taking it up again."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, TypeVar

from swift.config.commands import (
    AppConfig,
    DeployConfig,
    InferConfig,
    MergeLoraConfig,
    RlhfConfig,
    SampleConfig,
    SftConfig,
    TrainConfig,
)
from swift.config.files import CONFIG_NAME, dump_yaml, given_in_file, read_config_file, to_nested
from swift.config.preference import PreferenceConfig
from swift.config.resolve import Resolved, construct, group_spellings, raise_problems, resolve
from swift.config.schema import names_of, settings_of
from swift.config.task import TaskConfig
from swift.core.errors import UsageError
from swift.core.files import write_atomic

C = TypeVar("C")

# settings of one start, not of the run
_NOT_KEPT = frozenset({"resume_from_checkpoint", "resume_only_model", "overwrite_output_dir"})
# what inference takes from training: which model for which task, and how a conversation is written
_MODEL_AND_TEMPLATE = (
    "model", "model_type", "model_revision", "use_hf", "trust_remote_code", "rope_scaling", "max_model_len",
    "new_special_tokens", "template", "system", "enable_thinking", "use_chat_template",
    "task_type", "pooling", "positive_word", "negative_word",
)  # fmt: skip
_IN_THE_FILES = ("rope_scaling", "max_model_len", "new_special_tokens")  # of a model saved whole
# settings that may hold paths
_PATHS = (
    ("model", "model"), ("model", "adapters"), ("template", "template"), ("template", "system"),
    ("data", "dataset"), ("data", "val_dataset"), ("preference", "ref_model"), ("preference", "ref_adapters"),
    ("distill", "teacher_model"), ("distill", "teacher_adapters"), ("distill", "teacher_logits"),
    ("distill", "teacher_prompt"),
)  # fmt: skip
MANIFEST = "complete.json"  # the file that `swift.checkpoint` writes last
DEEPSPEED_FOLDER = "deepspeed"  # DeepSpeed's own files in a checkpoint
LATEST = frozenset({"latest", "last", "true"})
_DATA = (
    "dataset", "val_dataset", "data_seed", "columns", "disable_auto_column_mapping", "dataset_shuffle", "model_name",
    "model_author",
)  # fmt: skip


def save_config(config: Any, path: str | Path) -> Path:
    """Write a configuration as YAML, grouped, every value spelt out.

    Args:
        path: a folder (the file is then `swift_config.yaml` in it) or a file name. Paths of local models and data
            are written absolute, so that the run can be taken up from another working directory.

    Returns:
        The file written.
    """
    path = Path(path)
    target = path if path.suffix in (".yaml", ".yml") else path / CONFIG_NAME
    nested = to_nested(config)
    for group, name in _PATHS:
        value = nested.get(group, {}).get(name)
        if isinstance(value, list):
            nested[group][name] = [_absolute(item) for item in value]
        elif value:
            nested[group][name] = _absolute(value)
    write_atomic(target, dump_yaml(nested))
    return target


def _absolute(text: str) -> str:
    """`text` with the path in it made absolute, if it is one that exists; `:subset` and `#rows` may follow it."""
    for head in (text, text.rpartition("#")[0], text.partition("#")[0].rpartition(":")[0]):
        if head and "\n" not in head and len(head) < 1000 and Path(head).exists():
            return str(Path(head).resolve()) + text[len(head) :]
    return text


def load_config(cls: type[C], path: str | Path) -> C:
    """The configuration saved in a folder or file; settings that other commands wrote into it are left out.

    Raises:
        UsageError: if there is none, or it doesn't fit.
    """
    return construct(cls, saved_values(cls, Path(path)))


def find_saved(path: Path) -> Path | None:
    """The saved configuration of a checkpoint folder, looking in the run folder around it as well."""
    if path.is_file():
        return path
    for folder in (path, path.parent):
        if (folder / CONFIG_NAME).is_file():
            return folder / CONFIG_NAME
    return None


def saved_values(cls: type, path: Path) -> dict[str, Any]:
    """Typed values of the saved configuration at `path` that `cls` has settings for.

    Raises:
        UsageError: if there is no saved configuration.
    """
    saved = find_saved(path)
    if saved is None:
        raise UsageError(
            f"{path} holds no {CONFIG_NAME}", fix="give the settings on the command line, or name a folder of a run"
        )
    file = read_config_file(saved)
    names = names_of(cls)
    own = group_spellings(cls)
    others = {**group_spellings(SftConfig), **group_spellings(RlhfConfig)}.keys() - own.keys()
    # another command's group may hold a setting of the same name that means something else
    entries = [entry for entry in file.entries if entry.entries is None or entry.key not in others]
    given = given_in_file(dataclasses.replace(file, entries=entries), own, names)
    given = [item for item in given if item.name in names]
    resolved = resolve(cls, given)
    raise_problems(resolved.problems, subject=str(saved))
    return resolved.values


def fill_from_checkpoint(cls: type, resolved: Resolved) -> None:
    """Complete what the user gave from the checkpoint that it names, if it names one.

    Training with `resume_from_checkpoint` takes every setting not given; inference and merging take the model, the
    template and the system prompt (`load_args`), inference also the evaluation rows (`load_data_args`).
    """
    values = resolved.values
    if issubclass(cls, TrainConfig):
        checkpoint = values.get("resume_from_checkpoint")
        folder = resume_folder(checkpoint, values.get("output_dir"), values.get("model")) if checkpoint else None
        if folder is not None:  # found once, so that settings and weights come from one place
            values["resume_from_checkpoint"] = str(folder)
        if folder is not None and not values.get("resume_only_model") and find_saved(folder):
            _refuse_another_training(cls, resolved, folder)
            wanted = set(settings_of(cls)) - _NOT_KEPT
            _take(cls, resolved, folder, wanted)
        _base_model(resolved, values.get("adapters", []))
    elif cls in (InferConfig, SampleConfig, DeployConfig, AppConfig, MergeLoraConfig):
        if values.get("load_args") is False:
            return
        folders = [*values.get("adapters", []), *([values["model"]] if values.get("model") else [])]
        wanted = set(_MODEL_AND_TEMPLATE) | (set(_DATA) if values.get("load_data_args") else set())
        paths = [Path(name).parent if name.endswith(".gguf") else Path(name) for name in folders]
        for folder in filter(find_saved, paths):
            if (folder / "chat_template.jinja").is_file():  # its own copy; the file it came from may be gone
                wanted.discard("template")
            if not (folder / "adapter_config.json").is_file():
                wanted -= set(_IN_THE_FILES)
            _take(cls, resolved, folder, wanted)
            break
        _base_model(resolved, values.get("adapters", []))


def _refuse_another_training(cls: type, resolved: Resolved, folder: Path) -> None:
    """A run goes on for the end that it began with: optimizer and position mean nothing to another method."""
    saved = find_saved(folder)
    assert saved is not None
    groups = {entry.key for entry in read_config_file(saved).entries}
    before = saved_values(RlhfConfig if "preference" in groups else SftConfig, folder)
    began = _training_words("preference" in groups, before)
    asked = _training_words(issubclass(cls, RlhfConfig), {**before, **resolved.values})
    if began != asked:
        raise UsageError(
            f"the run was {began}, and {asked} would be another one",
            where=f"--resume_from_checkpoint {folder}",
            fix="--resume_only_model true, with --model and --dataset, takes the weights alone",
        )


def _training_words(preferring: bool, values: dict[str, Any]) -> str:
    if preferring:
        return f"`swift rlhf --rlhf_type {values.get('rlhf_type', PreferenceConfig.rlhf_type)}`"
    task = values.get("task_type", TaskConfig.task_type)
    return "supervised tuning" + ("" if task == TaskConfig.task_type else f" with --task_type {task}")


def _take(cls: type, resolved: Resolved, folder: Path, wanted: set[str]) -> None:
    saved = find_saved(folder)
    for name, value in saved_values(cls, folder).items():
        if name in wanted and name not in resolved.values:
            resolved.values[name] = value
            resolved.origins[name] = "checkpoint"
            resolved.places[name] = str(saved)


def _base_model(resolved: Resolved, adapters: list[str]) -> None:
    """An adapter made by peft names its base model."""
    if resolved.values.get("model") or not adapters:
        return
    described = Path(adapters[0]) / "adapter_config.json"
    if described.is_file():
        base = json.loads(described.read_text(encoding="utf-8")).get("base_model_name_or_path")
        if base:
            resolved.values["model"] = base
            resolved.origins["model"] = "checkpoint"
            resolved.places["model"] = str(described)


def resume_folder(checkpoint: str, output_dir: str | None, model: str | None = None) -> Path | None:
    """The folder that `--resume_from_checkpoint` means; None if there is none.

    `latest` (also `last` or `true`, as in older scripts) is the newest whole checkpoint below `output_dir`, in it or in
    one of its run folders; without `output_dir` below the one that runs of `model` have, or else below `output`.
    """
    if checkpoint.lower() not in LATEST:
        path = Path(checkpoint).expanduser()
        if path.is_dir() and not (path / MANIFEST).is_file():  # a run folder: its newest checkpoint
            return newest_checkpoint(path) or path
        return path if path.is_dir() else None
    return newest_checkpoint(latest_root(output_dir, model))


def latest_root(output_dir: str | None, model: str | None) -> Path:
    """The folder below which `latest` looks."""
    if output_dir:
        return Path(output_dir).expanduser()
    return Path("output", Path(model).name) if model else Path("output")


def newest_checkpoint(root: Path) -> Path | None:
    """The whole checkpoint with the latest completion time below `root` (at most three levels down)."""
    if not root.is_dir():
        return None
    marks = [m for pattern in ("", "*/", "*/*/") for m in root.glob(f"{pattern}checkpoint-*/{MANIFEST}")]
    marks = [m for m in marks if re.fullmatch(r"checkpoint-\d+", m.parent.name)]
    marks.sort(key=lambda m: (m.stat().st_mtime_ns, int(m.parent.name.rpartition("-")[2])), reverse=True)
    return next((mark.parent for mark in marks if damage(mark.parent) is None), None)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files by their sizes; None if they are as its manifest says.

    Their checksums are compared when it is loaded.
    """
    try:
        listed = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8")).get("files", {})
        for name, expected in listed.items():
            path = checkpoint / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} can't be read: {error}"
    return None
