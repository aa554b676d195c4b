"""A client for one chat-completions endpoint that speaks OpenAI's protocol: text out of messages, tried again in time.

Nothing is called unless somebody names an address; the key is read from the environment, sent in a header, and shown
nowhere. Redirects aren't followed: that would send the key to whom they name.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from swift.core.errors import SwiftError, UsageError
from swift.core.network import require_network

# nothing that another try would change: wrong key, wrong address, wrong model
_HOPELESS = {
    400: "the request",
    401: "the key",
    403: "the key's rights",
    404: "the address or the model",
    405: "the address",
    **dict.fromkeys((301, 302, 303, 307, 308), "the address"),
}
_MAX_WAIT_S = 60.0
_HERE = ("localhost", "127.0.0.1", "::1")


class NoAnswer(Exception):
    """No usable answer came to one question."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class ChatClient:
    """One endpoint. May be used from several threads.

    Args:
        base_url: address up to /v1.
        key_env: environment variable that holds the key; None: no key is sent.
        timeout_s: for one answer.
        retries: further tries after a time-out, a lost connection or HTTP 408, 429 and 5xx.
        backoff_s: wait before the first retry, s; doubled each time (a Retry-After header wins), at most a minute.
        where: the setting that named the variable, for messages.

    Attributes:
        num_retries: so far.

    Raises:
        UsageError: the address is none, or the variable holds no key.
        NetworkError: the address is elsewhere, and the network is forbidden.
    """

    def __init__(
        self,
        base_url: str,
        *,
        key_env: str | None = None,
        timeout_s: float = 120.0,
        retries: int = 4,
        backoff_s: float = 1.0,
        where: str | None = None,
    ) -> None:
        address = urlsplit(base_url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise UsageError(f"{base_url!r} is no address", where=where, fix="for example http://localhost:8000/v1")
        if address.hostname not in _HERE:
            require_network(base_url)
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.num_retries = 0
        self._timeout_s, self._retries, self._backoff_s = timeout_s, retries, backoff_s
        self._headers = {"Content-Type": "application/json"}
        if key_env is not None:
            key = os.environ.get(key_env)
            if not key:
                raise UsageError(
                    f"the environment variable {key_env} holds no key", where=where, fix=f"export {key_env}=…"
                )
            self._headers["Authorization"] = f"Bearer {key.strip()}"
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._lock = threading.Lock()

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The endpoint's answer to a request, after as many tries as it takes.

        Raises:
            NoAnswer: the tries are used up, or the answer is no JSON object.
            SwiftError: the endpoint refuses in a way that would be the same for every request.
        """
        data = json.dumps(body).encode()
        cause = ""
        for attempt in range(self._retries + 1):
            wait = min(_MAX_WAIT_S, self._backoff_s * 2**attempt)
            try:
                call = urllib.request.Request(self.url, data, self._headers)
                with self._opener.open(call, timeout=self._timeout_s) as response:
                    return _object(response.read())
            except urllib.error.HTTPError as error:
                said = error.read()[:300].decode(errors="replace").strip()
                cause = f"HTTP {error.code}: {said}"
                if error.code in _HOPELESS:
                    raise SwiftError(
                        f"the endpoint refuses ({cause})",
                        where=self.url,
                        fix=f"correct {_HOPELESS[error.code]}: address, model, key or the prompt's length",
                    ) from error
                if error.code not in (408, 429) and error.code < 500:
                    raise NoAnswer(cause) from error
                wait = _retry_after(error.headers.get("Retry-After"), wait)
            except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, cut off
                cause = str(getattr(error, "reason", "") or error or type(error).__name__)
            if attempt < self._retries:
                with self._lock:
                    self.num_retries += 1
                time.sleep(wait)
        raise NoAnswer(f"{cause} (after {self._retries + 1} tries)")

    def text(self, body: dict[str, Any]) -> str:
        """The text of the first choice, without thoughts and the white space around it.

        Raises:
            NoAnswer: there is none. SwiftError: see `ask`.
        """
        text = said(self.ask(body))[0].rpartition("</think>")[2].strip()
        if not text:
            raise NoAnswer("the answer is empty")
        return text


def said(answer: dict[str, Any]) -> list[str]:
    """The texts of an answer's choices.

    Raises:
        NoAnswer: it isn't a chat completion, or a choice holds no text.
    """
    try:
        texts = [choice["message"]["content"] for choice in answer["choices"]]
    except (LookupError, TypeError) as error:
        raise NoAnswer(f"not a chat completion: {json.dumps(answer)[:200]}") from error
    if not texts or not all(isinstance(text, str) for text in texts):
        raise NoAnswer("the answer holds no text")
    return texts


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise NoAnswer(f"not a chat completion: {data[:200].decode(errors='replace')!r}") from error
    if not isinstance(found, dict):
        raise NoAnswer(f"not a chat completion: {data[:200].decode(errors='replace')!r}")
    return found


def _retry_after(header: str | None, otherwise: float) -> float:
    """What a Retry-After header asks for in seconds; dates aren't read."""
    try:
        return min(_MAX_WAIT_S, max(0.0, float(header or "")))
    except ValueError:
        return otherwise
