"""File systems elsewhere: the one of a URL, and its failures as errors that name the place.

Drivers are fsspec's. Nothing heavy is imported before a URL is used, and network URLs are refused when offline.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from swift.core.errors import DataError, DependencyError, SwiftError, first_line
from swift.core.network import require_network

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_NO_NETWORK = frozenset({"file", "local", "memory"})


def is_url(location: str) -> bool:
    """Whether it names a file system other than the local one."""
    return _URL.match(location) is not None


def is_web(location: str) -> bool:
    """Whether a web server has it, which lists nothing."""
    return location.startswith(("http://", "https://"))


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it.

    Raises:
        NetworkError: it is on the network, which is forbidden.
        DependencyError: its driver isn't installed.
        DataError: no driver knows the scheme, or the driver refused.
    """
    match = _URL.match(url)
    scheme = match[1].lower() if match else "file"
    if scheme not in _NO_NETWORK:
        require_network(url)
    import fsspec
    from fsspec.registry import known_implementations

    try:
        with remote_errors(url):
            return fsspec.core.url_to_fs(url)
    except ValueError as error:
        raise DataError(f"no driver is known for {scheme}://", where=url, fix="copy the data here first") from error
    except ImportError as error:
        cause = error
        while isinstance(cause.__cause__ or cause.__context__, ImportError):
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        package = known_implementations.get(scheme, {}).get("class", scheme).partition(".")[0]
        if package == "fsspec":
            package = (cause.name or scheme).partition(".")[0]
        raise DependencyError(
            f"reading {scheme}:// needs the package {package!r}, and importing it failed: {cause}",
            where=url,
            fix=f"pip install {package}",
        ) from error


@contextmanager
def remote_errors(location: str) -> Iterator[None]:
    """Failures of a file system, as errors that name the location."""
    try:
        yield
    except (SwiftError, ImportError, ValueError):
        raise
    except FileNotFoundError as error:
        raise DataError("there is no such file", where=location, fix="check the URL") from error
    except PermissionError as error:
        raise DataError(
            f"access is denied: {first_line(error)}", where=location, fix="check the credentials of its driver"
        ) from error
    except Exception as error:  # drivers of file systems have no common type of error
        if not is_url(location) and not isinstance(error, OSError):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise DataError(f"the file can't be read: {why}", where=location) from error


class RemoteFile(io.RawIOBase):
    """A file of a remote file system whose errors name it."""

    def __init__(self, inner: Any, location: str, in_order: bool) -> None:
        self.inner = inner
        self.location = location
        self.in_order = in_order

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return not self.in_order and bool(self.inner.seekable())

    def seek(self, offset: int, whence: int = 0) -> int:
        with self._errors():
            return self.inner.seek(offset, whence)

    def tell(self) -> int:
        return self.inner.tell()

    def readinto(self, buffer: Any) -> int:
        with self._errors():
            data = self.inner.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with remote_errors(self.location):
                yield
        except ValueError as error:  # so fsspec says that a server gives whole files only
            raise DataError(
                "the server gives whole files only, and this format is read from several places",
                where=self.location,
                fix="copy it here first",
            ) from error

    def close(self) -> None:
        if not self.closed:
            self.inner.close()
        super().close()
