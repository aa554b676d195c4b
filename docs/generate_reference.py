"""Writes docs/configuration.md from the configuration dataclasses: the manual names exactly the flags that exist.

python docs/generate_reference.py           write the page
python docs/generate_reference.py --check   exit 1 if the page on disk differs
"""

from __future__ import annotations

import sys
from pathlib import Path

from swift.commands.config import ConvertOptions, SchemaOptions
from swift.commands.data import CheckHelp, PreviewHelp
from swift.commands.data_run import OperatorsFlags, ReportFlags, RunFlags
from swift.commands.doctor import DoctorOptions
from swift.commands.quickstart import QuickstartOptions
from swift.config import (
    AppConfig,
    DeployConfig,
    ExportConfig,
    InferConfig,
    MergeLoraConfig,
    PtConfig,
    RlhfConfig,
    SampleConfig,
    SftConfig,
)
from swift.config.catalog import COMMANDS
from swift.config.schema import Setting, default_words, groups_of, settings_of, type_words
from swift.core.doctor import VARIABLES

PAGE = Path(__file__).with_name("configuration.md")

_INTRODUCTION = """\
# Commands and settings

<!-- Written by docs/generate_reference.py from swift/config; edit those dataclasses instead of this page. -->

Settings come from three places; later ones win:

1. the defaults below,
2. a file given as first word or with `--config`: YAML or JSON, flat (`save_steps: 100`) or grouped under the names in
   brackets below (`checkpoint: {save_steps: 100}`, and `train:` for any of them),
3. flags on the command line: `--save_steps 100`.

Lists take several words (`--dataset a.jsonl b.jsonl`), JSON settings a quoted object
(`--columns '{"ask": "query"}'`), and true/false settings may stand bare (`--packing`). An `ENV:` block in a file sets
environment variables. `swift config show FILE` prints what a file comes to, `swift config schema` a JSON schema for
editors, and `swift config convert FILE` translates files of ms-swift, LLaMA-Factory and Axolotl. Each run leaves its
effective settings in `swift_config.yaml`, in the run folder and in every checkpoint.

In Python the same names are arguments: `swift.sft(model="smollm2", dataset=["rows.jsonl"], save_steps=100)`.
"""


# commands whose settings are not those of sft -> the class that declares them
_OTHERS: dict[str, type] = {
    "rlhf": RlhfConfig,
    "infer": InferConfig,
    "sample": SampleConfig,
    "deploy": DeployConfig,
    "app": AppConfig,
    "merge-lora": MergeLoraConfig,
    "export": ExportConfig,
    "data check": CheckHelp,
    "data preview": PreviewHelp,
    "data run": RunFlags,
    "data report": ReportFlags,
    "data operators": OperatorsFlags,
    "config schema": SchemaOptions,
    "config convert": ConvertOptions,
    "doctor": DoctorOptions,
    "quickstart": QuickstartOptions,
}


def page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION, _commands_table()]
    parts.append("## Settings of `swift sft` (and `train`)\n")
    parts.extend(_group(members) for members in groups_of(SftConfig).values())
    parts.append("## Settings of `swift pt`\n\nThose of `sft`, with other defaults:\n")
    parts.append(_changed_defaults(SftConfig, PtConfig))
    for command, cls in _OTHERS.items():
        parts.append(f"## Settings of `swift {command}`\n")
        if cls is RlhfConfig:
            parts.append("Other defaults than `sft` has: `--loss_scale last_round`.\n")
        parts.extend(_new_groups(cls, "sft"))
    parts.append(_variables_table())
    return "\n".join(parts).rstrip() + "\n"


def _variables_table() -> str:
    rows = [f"| `{name}` | {_cell(meaning)} |" for name, meaning in VARIABLES.items()]
    intro = "## Environment variables\n\n`swift doctor` shows those that are set.\n"
    return "\n".join([intro, "| if it is set | |", "|---|---|", *rows, ""])


def _commands_table() -> str:
    rows = [f"| `swift {c.name}` | {_cell(c.usage and f'`{c.usage}`')} | {_cell(c.help)} |" for c in COMMANDS.values()]
    return "\n".join(["## Commands\n", "| command | followed by | what it does |", "|---|---|---|", *rows, ""])


def _group(members: list[Setting]) -> str:
    group = f" `[{members[0].group}]`" if members[0].group else ""
    lines = [f"### {members[0].title}{group}\n", "| setting | value | default | meaning |", "|---|---|---|---|"]
    for setting in members:
        also = f" Also: {', '.join(f'`--{alias}`' for alias in setting.aliases)}." if setting.aliases else ""
        default = f"`{default_words(setting.default)}`" if default_words(setting.default) else ""
        meaning = f"{setting.help}.{also}" if also else setting.help
        lines.append(f"| `--{setting.name}` | {_cell(type_words(setting))} | {_cell(default)} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def _changed_defaults(base: type, other: type) -> str:
    lines = ["| setting | sft | pt |", "|---|---|---|"]
    before = settings_of(base)
    for name, setting in settings_of(other).items():
        if setting.default != before[name].default:
            was, now = default_words(before[name].default), default_words(setting.default)
            lines.append(f"| `--{name}` | {_cell(f'`{was}`' if was else '')} | `{_cell(now)}` |")
    return "\n".join(lines) + "\n"


def _new_groups(cls: type, command: str) -> list[str]:
    """Settings that `sft` hasn't; the shared groups are named."""
    known = groups_of(SftConfig)
    groups = groups_of(cls)
    shared = [_shared(members, known[group]) for group, members in groups.items() if group in known]
    parts = [f"As in `{command}`: {', '.join(shared)}.\n"] if shared else []
    own = {setting.name for members in known.values() for setting in members}
    for group, members in groups.items():
        added = [setting for setting in members if group not in known or setting.name not in own]
        parts += [_group(added)] if added else []
    return parts


def _shared(members: list[Setting], known: list[Setting]) -> str:
    """The name of a group that `sft` has as well, and which of its settings are missing."""
    missing = [setting.name for setting in known if setting.name not in {each.name for each in members}]
    without = ", ".join(f"`--{name}`" for name in missing)
    return f"{members[0].title} `[{members[0].group}]`" + (f" (without {without})" if missing else "")


def _cell(text: str) -> str:
    """Text for a Markdown table cell; templates' braces and angle brackets are left as they are read."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def main(arguments: list[str]) -> int:
    text = page()
    if "--check" in arguments:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE} is stale: run python docs/generate_reference.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
