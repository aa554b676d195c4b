"""What is wrong with the text of a YAML file, as errors that name the line. Knows nothing of what files mean."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swift.core.errors import UsageError


def utf8_text(path: Path) -> str:
    """The text of a file, without a byte-order mark.

    Raises:
        UsageError: it can't be read, or isn't UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 (byte {error.start})", fix=f"convert it: iconv -t UTF-8 {path}"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from None


@contextmanager
def yaml_faults(path: Path) -> Iterator[None]:
    """Turn what the YAML reader raises into a `UsageError` with the line."""
    import yaml

    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = f" {error.context}" if error.context else ""
        raise UsageError(
            f"{path} is not valid YAML: {error.problem}{context}",
            where=f"{path}:{mark.line + 1}" if mark else str(path),
            fix="check the indentation (spaces, no tabs) and quote values that contain `: ` or `#`",
        ) from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not valid YAML: {error}", where=str(path)) from None
