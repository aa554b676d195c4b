"""What an answer is worth: verifiers of text, and functions of one's own.

A reward is a function (answer, row) -> number, pure and fast. `row` is what the prompt came with: `reference`, the
answer that the row has (its `solution` where it names one), and the row's other fields under `extra`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swift.core.errors import UsageError
from swift.core.extras import require
from swift.core.registry import Registry

Reward = Callable[[str, Mapping[str, Any]], float]
REWARDS: Registry[Callable[[str], Reward]] = Registry("reward")
"""Name -> makes the reward from what stands behind the colon."""

# a minus belongs to a number where no digit stands before it; commas only between groups of three
_NUMBER = re.compile(r"(?<![\d.])(?:(?<!\d)-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_WEIGHT = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*\*\s*(.+)", re.DOTALL)


def make_reward(specs: Sequence[str]) -> Reward:
    """The weighted sum of rewards.

    Args:
        specs: each `name`, `name:argument` or `file.py:function`, perhaps with a weight: `0.5*name`.

    Raises:
        UsageError: a name that isn't known, an argument that isn't possible, a file without that function.
    """
    parts = [_one(spec) for spec in specs]

    def total(answer: str, row: Mapping[str, Any]) -> float:
        values = []
        for weight, reward in parts:
            try:
                value = float(reward(answer, row))
            except Exception as error:  # a boundary: what others wrote is called here
                raise UsageError(
                    f"a reward failed: {type(error).__name__}: {error}", where="--reward", fix="mend the function"
                ) from error
            if not math.isfinite(value):
                raise UsageError("a reward is not a finite number", where="--reward", fix="give numbers only")
            values.append(weight * value)
        return sum(values)

    return total


def _one(spec: str) -> tuple[float, Reward]:
    weighted = _WEIGHT.fullmatch(spec)
    weight, rest = (float(weighted[1]), weighted[2]) if weighted else (1.0, spec)
    name, _, argument = rest.partition(":")
    if name.endswith(".py"):
        return weight, _own(Path(name).expanduser(), argument)
    return weight, REWARDS[name.strip()](argument)


def _own(path: Path, name: str) -> Reward:
    """A function of a file."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}", where="--reward", fix="FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{path} has no function {name!r}", where="--reward", fix="FILE.py:FUNCTION")
    return function


def _no_argument(name: str, argument: str) -> None:
    if argument:
        raise UsageError(f"the reward {name} takes nothing behind a colon", where="--reward", fix=f"--reward {name}")


@REWARDS.register("match")
def match(argument: str) -> Reward:
    """1 where the answer is the reference, capitals, white space and a last full stop aside."""
    _no_argument("match", argument)
    return lambda answer, row: float(row["reference"] is not None and _plain(answer) == _plain(row["reference"]))


@REWARDS.register("number")
def number(argument: str) -> Reward:
    """1 where the last number of the answer is the last number of the reference."""
    _no_argument("number", argument)

    def reward(answer: str, row: Mapping[str, Any]) -> float:
        wanted, got = _last_number(row["reference"] or ""), _last_number(answer)
        return float(wanted is not None and got is not None and math.isclose(wanted, got, rel_tol=1e-9, abs_tol=1e-9))

    return reward


@REWARDS.register("json")
def valid_json(argument: str) -> Reward:
    """1 where the answer is JSON."""
    _no_argument("json", argument)

    def reward(answer: str, row: Mapping[str, Any]) -> float:
        try:
            json.loads(answer, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return 0.0
        return 1.0

    return reward


@REWARDS.register("schema")
def schema(argument: str) -> Reward:
    """1 where the answer is JSON of a schema, which a file holds."""
    path = Path(argument).expanduser()
    if not argument or not path.is_file():
        raise UsageError(f"there is no file {argument!r} with a schema", where="--reward", fix="schema:FILE")
    jsonschema = require("jsonschema", extra="serve", purpose="check answers against a schema")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator.check_schema(content)
    except (ValueError, jsonschema.SchemaError) as error:
        said = str(error).splitlines()[0]
        raise UsageError(f"{path} is no JSON schema: {said}", where="--reward") from error
    validator = jsonschema.Draft202012Validator(content)

    def reward(answer: str, row: Mapping[str, Any]) -> float:
        try:
            return float(validator.is_valid(json.loads(answer, parse_constant=_no_constant)))
        except (ValueError, RecursionError):
            return 0.0

    return reward


@REWARDS.register("regex")
def regex(argument: str) -> Reward:
    """1 where the pattern is found in the answer."""
    try:
        pattern = re.compile(argument, re.DOTALL)
    except re.error as error:
        raise UsageError(f"{argument!r} is no regular expression: {error}", where="--reward") from error
    return lambda answer, row: float(pattern.search(answer) is not None)


@REWARDS.register("length")
def length(argument: str) -> Reward:
    """1 where the answer has that many characters."""
    bounds = re.fullmatch(r"(\d+)-(\d+)", argument)
    if bounds is None or int(bounds[1]) > int(bounds[2]):
        raise UsageError(f"length:{argument} is not possible", where="--reward", fix="for example length:1-500")
    least, most = int(bounds[1]), int(bounds[2])
    return lambda answer, row: float(least <= len(answer) <= most)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _plain(text: str) -> str:
    return " ".join(text.split()).rstrip(".").casefold()


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
