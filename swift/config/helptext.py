"""`swift COMMAND --help`: grouped, with types, defaults and older names, made from the dataclasses without tyro."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from swift.config.schema import Setting, default_words, groups_of, settings_of, type_words
from swift.core.errors import nearest

_INDENT = 4


def render_help(cls: type, *, command: str, usage: str = "", words: Sequence[str] = ()) -> str:
    """The help of a command.

    Args:
        cls: its configuration or options class.
        command: its name.
        usage: what follows the name in the usage line.
        words: show only the groups with these titles and the settings that contain one of these words.
    """
    style = Style.for_stdout()
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    summary = (cls.__doc__ or "").strip().splitlines()
    lines = [f"usage: swift {command} {usage}".rstrip(), ""]
    if summary and not summary[0].startswith(cls.__name__ + "("):
        lines += [summary[0], ""]
    groups = groups_of(cls)
    if words:
        groups, matched = _filtered(groups, words)
        if not matched:
            close = nearest(words[0], settings_of(cls), count=5)
            hint = f" Closest: {', '.join('--' + name for name in close)}." if close else ""
            return f"No setting of `swift {command}` matches {' '.join(words)!r}.{hint}\n"
    grouped = any(groups)
    if grouped and not words:
        lines += textwrap.wrap(
            "Settings come from FILE.yaml (or .json; flat, or grouped under the names in brackets), then from flags, "
            "which win. Lists take several words, JSON settings a quoted object, true/false settings may stand bare. "
            f"`swift {command} --help WORD` shows a part.",
            width,
        )
        lines.append("")
    for group, members in groups.items():
        title = members[0].title
        lines.append(style.bold(f"{title} [{group}]" if group else title))
        for setting in members:
            lines += _setting_lines(setting, width, style)
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _filtered(groups: dict[str, list[Setting]], words: Sequence[str]) -> tuple[dict[str, list[Setting]], bool]:
    """Groups called by a word in full, else the settings with a word in their names, else in their help."""
    wanted = [word.lower().lstrip("-").replace("-", "_") for word in words]
    by_title = {g: m for g, m in groups.items() if {g, m[0].title.lower()} & set(wanted)}
    if by_title:
        return by_title, True
    for place in (lambda s: " ".join((s.name, *s.aliases)), lambda s: s.help.lower()):
        found = {g: [s for s in members if any(w in place(s) for w in wanted)] for g, members in groups.items()}
        found = {g: members for g, members in found.items() if members}
        if found:
            return found, True
    return {}, False


def _setting_lines(setting: Setting, width: int, style: Style) -> list[str]:
    head = f"  --{setting.name} {style.dim(type_words(setting))}"
    parts = [setting.help]
    default = default_words(setting.default)
    if default:
        parts.append(f"[{default}]")
    if setting.aliases:
        parts.append("(also " + ", ".join("--" + alias for alias in setting.aliases) + ")")
    body = textwrap.wrap(" ".join(parts), width - _INDENT - 2)
    return [head, *(" " * (_INDENT + 2) + line for line in body)]


class Style:
    """Bold and dim text on terminals; plain text elsewhere."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    @classmethod
    def for_stdout(cls) -> Style:
        """Enabled when standard output is a terminal that isn't `dumb`."""
        import os

        return cls(sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ)

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.enabled else text

    def dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self.enabled else text
