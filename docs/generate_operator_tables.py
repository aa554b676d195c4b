"""Writes the tables of settings in docs/data-operators.md from the operators' dataclasses; the text around them stays.

python docs/generate_operator_tables.py           write the tables
python docs/generate_operator_tables.py --check   exit 1 if a table on disk differs
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from swift.data.engine.operator import OPERATORS
from swift.data.engine.plugins import load_builtin

PAGE = Path(__file__).with_name("data-operators.md")
_TABLE = re.compile(r"<!-- settings: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def with_tables(page: str) -> str:
    """The page with each table between its marks made anew."""
    load_builtin()
    return _TABLE.sub(lambda match: f"<!-- settings: {match[1]} -->\n{table(match[1])}<!-- end -->", page)


def table(name: str) -> str:
    """The settings of an operator in Markdown."""
    rows = [
        f"| `{member.name}` | {_default(member)} | {member.metadata['help']} |\n"
        for member in fields(OPERATORS[name])
        if member.init
    ]
    return "| setting | default | |\n|---|---|---|\n" + "".join(rows)


def _default(member: Field[Any]) -> str:
    if member.default is not MISSING:
        value = member.default
    elif member.default_factory is not MISSING:
        value = member.default_factory()
    else:
        return "must be given"
    return "none" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`"


def main() -> int:
    old = PAGE.read_text(encoding="utf-8")
    new = with_tables(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
