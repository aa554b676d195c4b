"""Configurations from Python: one call, from a flat or nested mapping."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from swift.config.deepspeed import fill_from_deepspeed
from swift.config.files import to_flat
from swift.config.idle import idle_notes
from swift.config.resolve import construct, raise_problems, resolve_mapping
from swift.config.saved import fill_from_checkpoint, saved_values
from swift.core.logging import get_logger

C = TypeVar("C")


def build_config(cls: type[C], values: Mapping[str, Any], *, source: str = "settings") -> C:
    """A configuration from a flat (`{"save_steps": 100}`) or nested (`{"train": {"save_steps": 100}}`) mapping.

    Names may be aliases or older tools' names; values may be typed or text. When the values name a checkpoint
    (`resume_from_checkpoint`, or `adapters` in inference), what they leave out is taken from it; see
    `with_saved_config`. Cross-field checks are not made here: see `swift.config.checks`.

    Args:
        cls: `SftConfig`, `PtConfig`, `InferConfig` or `MergeLoraConfig`.
        values: by setting name, or by group.
        source: what to call the values in messages.

    Raises:
        UsageError: unknown names (with the nearest known one), values of a wrong type, settings that this version
            lacks; all of them in one error.
    """
    resolved = resolve_mapping(cls, values, source)
    raise_problems(resolved.problems)
    fill_from_checkpoint(cls, resolved)
    fill_from_deepspeed(resolved)
    raise_problems(resolved.problems)
    config = construct(cls, resolved.values)
    for note in (*resolved.notes, *idle_notes(to_flat(config), resolved.origins)):
        get_logger().info(note)
    return config


def with_saved_config(cls: type, values: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """`values` (flat or nested, as given) completed from the configuration saved in a run or checkpoint folder.

    Returns:
        Typed values by setting name, ready for `build_config`.

    Raises:
        UsageError: as `build_config`; also when `path` has no saved configuration.
    """
    resolved = resolve_mapping(cls, values, "settings")
    raise_problems(resolved.problems)
    return {**saved_values(cls, Path(path)), **resolved.values}
