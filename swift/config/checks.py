"""Everything that can be found wrong with a configuration before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swift.config.resolve import Problem, raise_problems


def check(config: Any, *, places: Mapping[str, str] | None = None) -> None:
    problems: list[Problem] = []
    raise_problems(problems)
