"""The page on operators names every operator, every setting with its default, and every reason."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from swift.data.engine.operator import OPERATORS
from swift.data.operators import (
    blocklist,
    c4,
    chat,
    filter,
    html_text,
    language,
    length,
    normalise,
    perplexity,
    pii,
    quality,
    repetition,
    sample,
)

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "data-operators.md").read_text(encoding="utf-8")
MODULES = (
    blocklist,
    c4,
    chat,
    filter,
    html_text,
    language,
    length,
    normalise,
    perplexity,
    pii,
    quality,
    repetition,
    sample,
)
NAMES = [name for name in OPERATORS if sys.modules[OPERATORS[name].__module__] in MODULES]


def test_the_tables_are_those_of_the_code() -> None:
    done = subprocess.run([sys.executable, "docs/generate_operator_tables.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run python docs/generate_operator_tables.py"


@pytest.mark.parametrize("name", NAMES)
def test_each_operator_has_its_section_and_table(name: str) -> None:
    assert f"\n## {name}\n" in PAGE
    assert f"<!-- settings: {name} -->\n| setting" in PAGE


@pytest.mark.parametrize("name", NAMES)
def test_each_operator_says_what_it_does(name: str) -> None:
    first = (inspect.getdoc(OPERATORS[name]) or "").splitlines()[0]
    assert first.endswith(".") and len(first) > 30


@pytest.mark.parametrize("module", [c4, chat, blocklist, sample, html_text, language])
def test_each_reason_is_explained(module: object) -> None:
    source = inspect.getsource(module)  # type: ignore[arg-type]
    reasons = set(re.findall(r'tally\.drop\(\w+, "(\w+)"', source)) | set(
        re.findall(r'(?:yield|return) "(\w+)", f?"', source)
    )
    assert reasons
    assert not {reason for reason in reasons if f"`{reason}`" not in PAGE}
