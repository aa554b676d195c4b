"""A file on its way from another tool to ours: what could be kept, what was lost and why."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swift.config import commands as classes
from swift.config import legacy
from swift.config.catalog import COMMANDS
from swift.config.files import annotated_yaml
from swift.config.schema import Setting, names_of, settings_of
from swift.config.values import ValueProblem, coerce, to_words
from swift.core.errors import nearest


@dataclass
class Conversion:
    """A file on its way from another tool to ours.

    Attributes:
        tool: where it comes from.
        command: the command that it is for.
        values: typed values by setting name.
        comments: remarks beside settings, such as "Axolotl's default".
        lost: key -> (value, why there is no equivalent, or what to do instead).
        satisfied: key -> why it needs no setting.
    """

    tool: str
    command: str
    base: Path
    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    lost: dict[str, tuple[Any, str]] = field(default_factory=dict)
    satisfied: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Setting]:
        """The settings of the command it is for."""
        return settings_of(getattr(classes, COMMANDS[self.command].config or ""))

    def set(self, name: str, value: Any, *, key: str | None = None, comment: str | None = None) -> None:
        """Give our setting `name` a value that stood under `key`; a value that doesn't fit is listed as lost."""
        setting = self.settings.get(name)
        if setting is None:
            self.lose(key or name, value, f"`swift {self.command}` has no use for it")
            return
        words = to_words(value)
        later = legacy.missing_value(name, words)
        if later:
            self.lose(key or name, value, later)
            return
        try:
            self.values[name] = coerce(legacy.rename_value(name, words), setting)
        except ValueProblem as problem:
            self.lose(key or name, value, f"{problem.message}; {problem.fix}")
            return
        if comment:
            self.comments[name] = comment

    def default(self, name: str, value: Any, tool: str) -> None:
        """Write out the other tool's default, unless the file says something."""
        if name in self.values or name not in self.settings:
            return
        if self.settings[name].default != value:
            self.set(name, value, comment=f"{tool}'s default")

    def lose(self, key: str, value: Any, reason: str) -> None:
        """List something that has no equivalent."""
        self.lost[key] = (value, reason)

    def ignore(self, key: str, reason: str) -> None:
        """List something that needs no setting here."""
        self.satisfied[key] = reason

    def take(self, data: dict[str, Any], names: Mapping[str, str]) -> None:
        """Move keys that only have another name."""
        for key, name in names.items():
            if key in data:
                value = data.pop(key)
                if value is not None:
                    self.set(name, value, key=key)

    def take_satisfied(self, data: dict[str, Any], reasons: Mapping[str, str]) -> None:
        """Move keys that need nothing here; a key ending in ``*`` stands for all that begin so."""
        for pattern, reason in reasons.items():
            stem = pattern.rstrip("*")
            for key in [k for k in data if k == pattern or (pattern.endswith("*") and k.startswith(stem))]:
                if data.pop(key) not in (None, False):
                    self.ignore(key, reason)

    def take_lost(self, data: dict[str, Any], reasons: Mapping[str, str]) -> None:
        """Move keys that have no equivalent; unset ones need no mention."""
        for pattern, reason in reasons.items():
            stem = pattern.rstrip("*")
            for key in [k for k in data if k == pattern or (pattern.endswith("*") and k.startswith(stem))]:
                value = data.pop(key)
                if value not in (None, False, [], {}, ""):
                    self.lose(key, value, reason)

    def take_rest(self, data: dict[str, Any]) -> None:
        """What the tool's own table doesn't know: a Hugging Face name that we know too, or a foreign one."""
        known = names_of(getattr(classes, COMMANDS[self.command].config or ""))
        for key, value in data.items():
            if value is None:
                continue
            name = known.get(key)
            if name is not None:
                self.set(name, value, key=key)
                continue
            verdict = legacy.judge(key, to_words(value))
            if verdict is None:
                close = nearest(key, known)
                self.lose(key, value, f"unknown here; the nearest setting is {close[0]}" if close else "unknown here")
            elif verdict.instead is not None:
                self.lose(key, value, verdict.instead)
            else:
                for setting, words in verdict.settings:
                    self.set(setting, words, key=key)
                if verdict.note:
                    self.ignore(key, verdict.note.removeprefix(f"--{key}: "))

    def to_yaml(self, source: str) -> str:
        """The converted file, with everything that needs a human in comments at its head."""
        lines = [f"# from {source} ({self.tool}); run it with: swift {self.command} THIS_FILE.yaml"]
        if self.lost:
            lines.append("#")
            lines.append("# no equivalent:")
            lines += [f"#   {key}: {_one_line(value)} -- {reason}" for key, (value, reason) in self.lost.items()]
        text = "\n".join(lines) + "\n"
        groups: dict[str, dict[str, Any]] = {"ENV": dict(self.env)} if self.env else {}
        for name, setting in self.settings.items():
            if name in self.values:
                groups.setdefault(setting.group, {})[name] = self.values[name]
        return text + annotated_yaml(groups, self.comments)


def take_sharding(data: dict[str, Any], out: Conversion) -> None:
    """FSDP and DeepSpeed as Hugging Face's trainer, LLaMA-Factory and Axolotl write them."""
    options = data.pop("fsdp_config", None)
    kinds = names_in(str(data.get("fsdp")).replace(" ", ",")) if isinstance(data.get("fsdp"), str) else data.get("fsdp")
    version = data.pop("fsdp_version", None)
    data.pop("fsdp", None)
    if isinstance(options, str):
        out.lose("fsdp_config", options, "give zero_stage, fsdp_cpu_offload and reduce_dtype")
        options = {}
    options = {str(key).removeprefix("fsdp_"): value for key, value in (options or {}).items()}
    if kinds or options or version:
        words = names_in(kinds) if kinds else []
        out.set("fsdp", "hsdp" if any("hybrid" in word for word in words) else "fsdp2", key="fsdp")
        if "shard_grad_op" in words or options.get("reshard_after_forward") in (False, "false", "SHARD_GRAD_OP"):
            out.set("zero_stage", 2, key="fsdp_config")
        if "offload" in words or any(
            options.get(key) for key in ("offload_params", "cpu_offload", "cpu_offload_params")
        ):
            out.set("fsdp_cpu_offload", True, key="fsdp_config")
    deepspeed = data.pop("deepspeed", None)
    if deepspeed:
        out.set("deepspeed", _deepspeed(deepspeed, out.base), key="deepspeed")


def _deepspeed(value: Any, base: Path) -> Any:
    """The file, where it is there; else what the name of a well-known one says: `ds_z3_offload_config.json`."""
    if not isinstance(value, str):
        return json.dumps(value)
    for place in (Path(value), base / value):
        if place.is_file():
            return str(place)
    stage = re.search(r"(?:zero|z)_?([123])", Path(value).stem)
    if stage is None or stage[1] == "1":
        return value if stage is None else "zero1"
    return f"zero{stage[1]}" + ("_offload" if "offload" in value else "")


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())[:120]


def names_in(text: Any) -> list[str]:
    """A list that may be written as text with commas."""
    if text is None:
        return []
    if isinstance(text, str):
        return [part.strip() for part in text.split(",") if part.strip()]
    return [str(part) for part in text] if isinstance(text, Iterable) else [str(text)]


def by_reason(table: Mapping[str, str]) -> dict[str, str]:
    """`{reason: "key key"}` -> `{key: reason}`."""
    return {key: reason for reason, keys in table.items() for key in keys.split()}
