"""Errors a user can act on.

Every error the program raises on purpose is a `SwiftError`: it says what was wrong, where (a file and line, a flag, a
row), and what to do. The command line prints these three parts and exits with `exit_code`; a traceback means a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from swift.core.addresses import without_secrets


class SwiftError(Exception):
    """A failure with a cause and a remedy.

    Args:
        message: what is wrong, in one sentence.
        where: file:line, flag or row that it comes from, if there is one.
        fix: what the user can do about it.
    """

    exit_code = 1

    def __init__(self, message: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.message = without_secrets(message)
        self.where = without_secrets(where) if where else where
        self.fix = without_secrets(fix) if fix else fix
        super().__init__(self.render())

    def render(self) -> str:
        """The plain text form: message, then where, then fix, a line each."""
        lines = [self.message]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)

    def __reduce__(self):  # keeps where and fix across process boundaries
        return (_rebuild, (type(self), self.message, self.where, self.fix))


def _rebuild(cls: type[SwiftError], message: str, where: str | None, fix: str | None) -> SwiftError:
    return cls(message, where=where, fix=fix)


class UsageError(SwiftError):
    """The command line or the configuration file is wrong. Nothing was started."""

    exit_code = 2


class DataError(SwiftError):
    """A data file, a row or a whole dataset can't be used as asked."""


class ModelError(SwiftError):
    """A model, tokenizer or adapter can't be found, loaded or used as asked."""


class TemplateError(SwiftError):
    """A chat template can't render a conversation, or its assistant spans can't be proven."""


class CheckpointError(SwiftError):
    """A checkpoint is missing, incomplete, of another run, or could not be written."""


class NumericsError(SwiftError):
    """Training produced NaN or Inf, or had nothing to learn from."""


class DependencyError(SwiftError):
    """An optional package is needed for what was asked."""


class NetworkError(SwiftError):
    """A download was needed and is forbidden (`--offline`) or failed."""


def nearest(name: str, known: Iterable[str], *, count: int = 1) -> list[str]:
    """The known names closest to `name`, best first; empty when none is close."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=count, cutoff=0.6)
    if not close:
        close = [k for k in known if name and (k.startswith(name) or name.startswith(k))][:count]
    return close


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean X?` or an empty string."""
    close = nearest(name, known)
    return f"did you mean {close[0]}?" if close else ""


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line: its kind and the beginning of its text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
