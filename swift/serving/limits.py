"""Who may ask, how often and how much: keys, rates, concurrency, and how long the queue may get.

Keys are kept as SHA-256 only and compared in constant time. Knows nothing of HTTP but the errors it raises.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

from swift.config.serving import ServeConfig
from swift.core.errors import UsageError
from swift.serving.errors import ApiError

_NUMBERS = ("requests_per_minute", "tokens_per_minute", "concurrency")
_ADMIN_NEEDED = "this needs an admin key"


@dataclass
class Bucket:
    """A budget that fills up over a minute. It may be overdrawn: the cost of an answer is known when it is there."""

    per_minute: int
    level: float = 0.0
    filled_at: float = 0.0

    def __post_init__(self) -> None:
        self.level, self.filled_at = float(self.per_minute), time.monotonic()

    def wait_s(self, cost: float) -> float:
        """Seconds until `cost` is there; 0 when it is."""
        now = time.monotonic()
        rate = self.per_minute / 60
        self.level = min(float(self.per_minute), self.level + (now - self.filled_at) * rate)
        self.filled_at = now
        return max(0.0, (cost - self.level) / rate)

    def take(self, cost: float) -> None:
        self.level -= cost


@dataclass
class Key:
    """One key and what it may do.

    Attributes:
        name: for the log; never the key.
        digest: its SHA-256; empty for the nameless client of a server without keys.
        admin: it may load and unload adapters.
    """

    name: str
    digest: bytes = b""
    admin: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    num_active: int = 0
    requests: Bucket | None = field(default=None, init=False)
    tokens: Bucket | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.requests = Bucket(self.requests_per_minute) if self.requests_per_minute else None
        self.tokens = Bucket(self.tokens_per_minute) if self.tokens_per_minute else None

    def enter(self) -> None:
        """Begin a request.

        Raises:
            ApiError: 429, with the time to wait.
        """
        if self.concurrency is not None and self.num_active >= self.concurrency:
            raise ApiError(
                429, f"{self.concurrency} requests of this key are running, and no more may", code="concurrency",
                retry_after_s=1,
            )  # fmt: skip
        if self.tokens is not None and (wait := self.tokens.wait_s(1.0)):
            raise ApiError(
                429, f"this key has used its {self.tokens_per_minute} tokens a minute", code="tokens",
                retry_after_s=wait,
            )  # fmt: skip
        if self.requests is not None:
            if wait := self.requests.wait_s(1.0):
                raise ApiError(
                    429, f"this key has made its {self.requests_per_minute} requests a minute", code="requests",
                    retry_after_s=wait,
                )  # fmt: skip
            self.requests.take(1)
        self.num_active += 1

    def leave(self, num_tokens: int) -> None:
        """End a request that took `num_tokens`, of prompt and answer."""
        self.num_active -= 1
        if self.tokens is not None:
            self.tokens.take(num_tokens)


class Keys:
    """All keys of a server."""

    def __init__(self, keys: list[Key]) -> None:
        self.needed = any(not key.admin for key in keys)
        self._keys = keys
        self._anyone = Key("anyone")

    def find(self, authorization: str | None) -> Key:
        """Whose request it is.

        Args:
            authorization: the header of that name.

        Raises:
            ApiError: 401, without a valid key where one is needed.
        """
        scheme, _, word = (authorization or "").partition(" ")
        given = hashlib.sha256(word.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:  # all of them, so that time says nothing about which was nearly right
            if hmac.compare_digest(key.digest, given):
                found = key
        if found is not None and scheme.lower() == "bearer":
            return found
        if not self.needed:
            return self._anyone
        if not authorization:
            raise ApiError(401, "no API key was given: send Authorization: Bearer KEY", code="missing_api_key")
        raise ApiError(401, "the API key is not valid", code="invalid_api_key")

    def require_admin(self, key: Key) -> None:
        """Raise 403 unless `key` is an admin's."""
        if not key.admin:
            any_admin = any(each.admin for each in self._keys)
            raise ApiError(
                403, _ADMIN_NEEDED if any_admin else f"{_ADMIN_NEEDED}; the server was started without --admin_api_key"
            )


def read_keys(config: ServeConfig) -> Keys:
    """The keys of the settings.

    Raises:
        UsageError: the file can't be read, or a line of it is not understood.
    """
    usual = Key("", requests_per_minute=config.requests_per_minute, tokens_per_minute=config.tokens_per_minute,
                concurrency=config.key_concurrency)  # fmt: skip
    keys = [replace(usual, name=f"key{n}", digest=_digest(text)) for n, text in enumerate(config.api_key, 1)]
    if config.api_key_file:
        path = Path(config.api_key_file).expanduser()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"the file of keys can't be read: {error}", where=f"--api_key_file {path}") from error
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                keys.append(_parse_line(line, usual, f"{path}:{number}", number))
        if not keys:
            raise UsageError("the file holds no key", where=f"--api_key_file {path}", fix="write one in each line")
    if config.admin_api_key:
        keys.append(Key("admin", _digest(config.admin_api_key), admin=True))
    return Keys(keys)


def _parse_line(line: str, usual: Key, where: str, number: int) -> Key:
    word, *settings = line.split()
    key = replace(usual, name=f"line{number}", digest=_digest(word))
    for text in settings:
        name, equals, value = text.partition("=")
        if text == "admin":
            key = replace(key, admin=True)
        elif name == "name" and value:
            key = replace(key, name=value)
        elif name in _NUMBERS and equals and value.isdigit() and int(value) > 0:
            key = replace(key, **{name: int(value)})  # type: ignore[arg-type]
        else:
            raise UsageError(
                f"{text!r} is not understood", where=where, fix="name=ID, admin, or " + "=N, ".join(_NUMBERS) + "=N"
            )
    return key


def _digest(text: str) -> bytes:
    """SHA-256 of a key; `sha256:HEX` is one already."""
    if text.startswith("sha256:"):
        try:
            digest = bytes.fromhex(text.removeprefix("sha256:"))
        except ValueError:
            digest = b""
        if len(digest) != 32:
            raise UsageError("a hashed key is sha256: and 64 hexadecimal digits", where="--api_key_file")
        return digest
    if not text:
        raise UsageError("an API key is empty", where="--api_key", fix="leave it out, or give one")
    return hashlib.sha256(text.encode()).digest()


class Queue:
    """How many answers are there at a time: those in the batch and those waiting.

    Args:
        places: answers computed together.
        max_waiting: more than these besides are refused.
    """

    def __init__(self, places: int, max_waiting: int) -> None:
        self.capacity = places + max_waiting
        self._places = places
        self.num_answers = 0
        self._durations: deque[float] = deque(maxlen=100)

    def enter(self, count: int) -> None:
        """Take places for `count` answers.

        Raises:
            ApiError: 429, or 400 where there are never so many.
        """
        if count > self.capacity:
            raise ApiError(400, f"{count} answers were asked for, and {self.capacity} at most can wait", param="n")
        if self.num_answers + count > self.capacity:
            mean = sum(self._durations) / len(self._durations) if self._durations else 1.0
            raise ApiError(
                429,
                f"the server is busy: {self.num_answers} answers are running or waiting",
                code="queue_full",
                retry_after_s=mean * (self.num_answers + count - self.capacity) / self._places,
            )
        self.num_answers += count

    def leave(self, count: int, duration_s: float) -> None:
        self.num_answers -= count
        self._durations.append(duration_s)
