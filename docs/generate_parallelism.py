"""Writes the table of tested layouts in docs/parallelism.md from the test that runs them; the text around it stays.

python docs/generate_parallelism.py           write the table
python docs/generate_parallelism.py --check   exit 1 if the table on disk differs
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from training.test_parallel_matrix import KINDS, LAYOUTS, LAYOUTS_OF_RANKS, TUNERS, Case, possible, sampled

PAGE = Path(__file__).with_name("parallelism.md")
_TABLE = re.compile(r"<!-- layouts -->\n.*?<!-- end -->", re.DOTALL)


def with_table(page: str) -> str:
    """The page with the table between its marks made anew.

    Raises:
        ValueError: the page has no such marks.
    """
    new, count = _TABLE.subn(lambda _: f"<!-- layouts -->\n{table()}<!-- end -->", page)
    if count != 1:
        raise ValueError(f"{PAGE.name} has {count} places for the table")
    return new


def table() -> str:
    """A row for each layout, a column for each kind of model, and how many cases there are in all."""
    head = ["layout", "ranks", "axes and settings", *KINDS]
    rows = [_line(head), _line(["---"] * len(head))]
    for name, case in LAYOUTS_OF_RANKS.items():
        cells = [_cell(name, kind) if possible(case, kind) else "–" for kind in KINDS]
        rows.append(_line([name, str(case.degrees.world_size), _words(case), *cells]))
    each = len(TUNERS) * len(LAYOUTS)
    count = sum(each for case in LAYOUTS_OF_RANKS.values() for kind in KINDS if possible(case, kind))
    fast = sum(len(sampled(name)) for name in LAYOUTS_OF_RANKS)
    return f"{count} cases, {fast} of them in `make test`:\n\n" + "".join(rows)


def _words(case: Case) -> str:
    """Sizes of axes, then what is set beside them, such as `dp_shard 2, fsdp fsdp2, zero_stage 2`."""
    settings = [f"{name} {str(value).lower()}" for name, value in case.settings]
    return ", ".join([case.degrees.words(), *settings])


def _cell(name: str, kind: str) -> str:
    """How many cases are tested, and which of them are in the fast tests."""
    cases = [(tuner, rows) for tuner in TUNERS for rows in LAYOUTS]
    fast = [" ".join(case) for case in cases if (kind, *case) in sampled(name)]
    return str(len(cases)) + (f": {', '.join(fast)}" if fast else "")


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def main() -> int:
    old = PAGE.read_text(encoding="utf-8")
    new = with_table(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
