"""The command reference of the manual, rendered from the dataclasses."""

from __future__ import annotations

from swift.config import commands as classes
from swift.config.catalog import COMMANDS, LATER
from swift.config.schema import Setting, default_words, groups_of, type_words


def reference_markdown() -> str:
    """The reference of all commands as one Markdown page: a section per command, a table per group of settings."""
    lines = [
        "# Command reference",
        "",
        "Generated from the configuration dataclasses; `swift COMMAND --help` shows the same. Settings come from "
        "`FILE.yaml` (first word, or `--config FILE`), then from flags, which win. A file may be flat or grouped "
        "under the names in brackets.",
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [`swift {c.name}`](#swift-{c.name}) | {_cell(c.help)} |" for c in COMMANDS.values()),
        "",
    ]
    described: dict[str, str] = {}
    for command in COMMANDS.values():
        lines += [f"## swift {command.name}", "", f"`swift {command.name} {command.usage}`".replace(" `", "`"), ""]
        if command.config is None:
            lines += [f"{command.help[0].upper()}{command.help[1:]}. `swift {command.name} --help` shows more.", ""]
            continue
        if command.config in described:
            lines += [f"The same as `swift {described[command.config]}`.", ""]
            continue
        described[command.config] = command.name
        config_class = getattr(classes, command.config)
        lines += [(config_class.__doc__ or "").strip(), ""]
        for group, members in groups_of(config_class).items():
            lines += [
                f"### {members[0].title} [{group}]",
                "",
                "| setting | type | default | meaning |",
                "|---|---|---|---|",
            ]
            lines += [_row(setting) for setting in members]
            lines.append("")
    lines += ["## Not available yet", "", "| command | meanwhile |", "|---|---|"]
    lines += [f"| `swift {name}` | {_cell(advice)} |" for name, advice in LATER.items()]
    return "\n".join(lines) + "\n"


def _row(setting: Setting) -> str:
    default = default_words(setting.default)
    also = f" Also `{'`, `'.join(setting.aliases)}`." if setting.aliases else ""
    shown = f"`{_cell(default)}`" if default else ""
    return f"| `{setting.name}` | {_cell(type_words(setting))} | {shown} | {_cell(setting.help + '.' + also)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
