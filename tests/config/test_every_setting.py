"""Every field of every command is reachable from the command line and from files, and explained."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from swift.config import ExportConfig, InferConfig, MergeLoraConfig, PtConfig, RlhfConfig, SftConfig, parse_command_line
from swift.config.schema import Setting, groups_of, settings_of

COMMANDS = {
    "sft": SftConfig,
    "pt": PtConfig,
    "rlhf": RlhfConfig,
    "infer": InferConfig,
    "merge-lora": MergeLoraConfig,
    "export": ExportConfig,
}
CASES = [
    pytest.param(command, setting, id=f"{command}-{setting.name}")
    for command, cls in COMMANDS.items()
    for setting in settings_of(cls).values()
]


def another_value(setting: Setting):
    """A value that isn't the default, and the words that say so."""
    default = setting.default
    if setting.is_dict:
        value = {"a": "b"}
        return value, [json.dumps(value)]
    if setting.is_list and get_args(setting.base)[0] is int:
        return [3, 5], ["3", "5"]
    if setting.name == "deepspeed":
        return "zero2", ["zero2"]
    if setting.is_list and get_args(setting.base)[0] is float:
        return [0.25, 2.0], ["0.25", "2.0"]
    if setting.is_list:
        value = [c for c in setting.choices if [c] != default][:1] or ["one", "two words"]
        return value, list(value)
    if setting.choices:
        value = next((c for c in setting.choices if c != default), setting.choices[0])
        return value, [value]
    if setting.base is bool:
        value = not default
        return value, ["true" if value else "false"]
    if setting.base is int:
        value = 7 if default != 7 else 8
        return value, [str(value)]
    if setting.base is float:
        return 0.375, ["0.375"]
    return "some text", ["some text"]


def value_of(config, setting: Setting):
    return getattr(getattr(config, setting.group), setting.name)


@pytest.mark.parametrize(("command", "setting"), CASES)
def test_from_the_command_line(command, setting):
    value, words = another_value(setting)
    parsed = parse_command_line(COMMANDS[command], [f"--{setting.name}", *words], command=command)
    assert value_of(parsed.config, setting) == value
    assert parsed.origins[setting.name] == "command line"


@pytest.mark.parametrize(("command", "setting"), CASES)
def test_from_a_file_flat_and_grouped(command, setting, tmp_path):
    value, _ = another_value(setting)
    for name, content in {
        "flat.yaml": {setting.name: value},
        "grouped.yaml": {setting.group: {setting.name: value}},
        "flat.json": {setting.name: value},
    }.items():
        (tmp_path / name).write_text(json.dumps(content))  # JSON is YAML as well
        parsed = parse_command_line(COMMANDS[command], [str(tmp_path / name)], command=command)
        assert value_of(parsed.config, setting) == value
        assert parsed.origins[setting.name] == name


@pytest.mark.parametrize(("command", "setting"), CASES)
def test_aliases_and_dashes(command, setting):
    value, words = another_value(setting)
    for spelling in (*setting.aliases, setting.name.replace("_", "-"), f"{setting.group}.{setting.name}"):
        parsed = parse_command_line(COMMANDS[command], [f"--{spelling}", *words], command=command)
        assert value_of(parsed.config, setting) == value


@pytest.mark.parametrize("command", COMMANDS)
def test_explained_and_grouped(command):
    for setting in settings_of(COMMANDS[command]).values():
        assert setting.help, f"{setting.name} has no help text"
        assert len(setting.help) < 200, f"{setting.name}: one sentence is enough"
    for members in groups_of(COMMANDS[command]).values():
        assert members[0].title and "\n" not in members[0].title


@pytest.mark.parametrize("command", COMMANDS)
def test_optional_settings_take_none(command):
    for setting in settings_of(COMMANDS[command]).values():
        if setting.optional:
            for word in ("none", "null", "None"):
                parsed = parse_command_line(COMMANDS[command], [f"--{setting.name}", word], command=command)
                assert value_of(parsed.config, setting) is None
