"""Paraphrase by a language model behind any endpoint that speaks OpenAI's chat-completions protocol.

Nothing is called unless a recipe names this transform with an address and a model. An answer that has lost a protected
span isn't used.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from swift.config.fields import setting
from swift.core.errors import NetworkError, SwiftError, UsageError
from swift.data.augment.text import kept_texts
from swift.data.augment.transform import TRANSFORMS, Request, Transform, Unchanged

DEFAULT_PROMPT = (
    "Rewrite the text below in other words. Keep its language, its meaning and its form (a question stays a question). "
    "Keep code, links, numbers, formulas and anything in braces or angle brackets exactly as they are. "
    "Answer with the rewritten text only.\n\n{text}"
)
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


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Following one would send the key to whom it names, and the text to nobody."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Failed(Exception):
    """A text for which no usable answer came."""


@TRANSFORMS.register("paraphrase_llm")
@dataclass(kw_only=True)
class ParaphraseLlm(Transform):
    """Has a language model behind an OpenAI-compatible endpoint rewrite the text."""

    name: ClassVar[str] = "paraphrase_llm"

    base_url: str = setting(help="address up to /v1, such as http://localhost:8000/v1")
    model: str = setting(help="model name as the endpoint knows it")
    api_key_env: str | None = setting(None, help="environment variable that holds the key; null: no key is sent")
    prompt: str = setting(DEFAULT_PROMPT, help="what is asked; {text} stands for the text")
    system: str | None = setting(None, help="system message before it")
    temperature: float = setting(0.7, help="of the sampling")
    max_tokens: int | None = setting(None, help="of the answer; null: the endpoint decides")
    send_seed: bool = setting(True, help="send a seed made of seed and row, so that endpoints that honour it repeat")
    timeout_s: float = setting(60.0, help="for one answer")
    retries: int = setting(3, help="further tries after a time-out, a lost connection or HTTP 408, 429 and 5xx")
    backoff_s: float = setting(1.0, help="wait before the first retry; doubled each time (a Retry-After header wins)")
    concurrency: int = setting(4, help="requests at a time")
    on_failure: Literal["keep", "stop"] = setting("keep", help="keep the text and count it, or stop")

    def check(self) -> None:
        super().check()
        address = urlsplit(self.base_url)
        fine = address.scheme in ("http", "https") and bool(address.hostname)
        self.require(fine, "base_url", "must be an address such as http://localhost:8000/v1")
        self.require(bool(self.model), "model", "must name a model")
        self.require("{text}" in self.prompt, "prompt", "must hold {text}")
        self.require(self.temperature >= 0, "temperature", "must be at least 0")
        self.require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1")
        self.require(self.timeout_s > 0, "timeout_s", "must be above 0")
        self.require(self.retries >= 0, "retries", "must be at least 0")
        self.require(self.backoff_s >= 0, "backoff_s", "must be at least 0")
        self.require(self.concurrency >= 1, "concurrency", "must be at least 1")

    def open(self, *, offline: bool = False) -> None:
        if offline:
            raise NetworkError(
                f"paraphrase_llm would call {self.base_url}, and the network is forbidden (--offline)",
                where="text.paraphrase_llm",
                fix="leave --offline out, or remove this transform",
            )
        self._headers = {"Content-Type": "application/json"}
        if self.api_key_env is not None:
            key = os.environ.get(self.api_key_env)
            if not key:
                raise UsageError(
                    f"the environment variable {self.api_key_env} holds no key",
                    where="text.paraphrase_llm.api_key_env",
                    fix=f"export {self.api_key_env}=…",
                )
            self._headers["Authorization"] = f"Bearer {key.strip()}"
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._url = self.base_url.rstrip("/") + "/chat/completions"
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def rewrite_all(self, requests: list[Request]) -> list[str | Unchanged]:
        bodies = [self._body(request) for request in requests]  # draws here, in order, not in threads
        with ThreadPoolExecutor(min(self.concurrency, len(requests))) as pool:
            waiting = [pool.submit(self._answer, *pair) for pair in zip(requests, bodies)]
            try:
                return [future.result() for future in waiting]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _body(self, request: Request) -> bytes:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.prompt.replace("{text}", request.text)})
        body: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": self.temperature}
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.send_seed:
            body["seed"] = int(request.rng.integers(1 << 31))
        return json.dumps(body).encode()

    def _answer(self, request: Request, body: bytes) -> str | Unchanged:
        try:
            answer = self._ask(body)
        except _Failed as failure:
            if self.on_failure == "stop":
                raise SwiftError(
                    f"the endpoint gave no usable answer: {failure}",
                    where=self._url,
                    fix='look at the endpoint\'s log; "on_failure": "keep" would keep such texts as they are',
                ) from failure
            return Unchanged("failed")
        if kept_texts(answer, self.kinds) != kept_texts(request.text, self.kinds):
            return Unchanged("protected_span_lost")
        return answer

    def _ask(self, body: bytes) -> str:
        """One answer, after as many tries as it takes.

        Raises:
            _Failed: the tries are used up, or the answer has no text.
            SwiftError: the endpoint refuses in a way that would be the same for every text.
        """
        for attempt in range(self.retries + 1):
            wait = min(_MAX_WAIT_S, self.backoff_s * 2**attempt)
            try:
                call = urllib.request.Request(self._url, body, self._headers)
                with self._opener.open(call, timeout=self.timeout_s) as response:
                    return _content(response.read())
            except urllib.error.HTTPError as error:
                said = error.read()[:300].decode(errors="replace").strip()
                cause = f"HTTP {error.code}: {said}"
                if error.code in _HOPELESS:
                    raise SwiftError(
                        f"the endpoint refuses ({cause})",
                        where=self._url,
                        fix=f"correct {_HOPELESS[error.code]}: base_url, model, api_key_env or the prompt's length",
                    ) from error
                if error.code not in (408, 429) and error.code < 500:
                    raise _Failed(cause) from error
                wait = _retry_after(error.headers.get("Retry-After"), wait)
            except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, cut off
                cause = str(getattr(error, "reason", "") or error or type(error).__name__)
            if attempt < self.retries:
                with self._lock:
                    self._counts["retries"] += 1
                time.sleep(wait)
        raise _Failed(f"{cause} (after {self.retries + 1} tries)")

    def take_counts(self) -> Counter[str]:
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts


def _content(answer: bytes) -> str:
    """The text of the first choice, without the white space and thoughts around it."""
    try:
        content = json.loads(answer)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise _Failed(f"not a chat completion: {answer[:200].decode(errors='replace')!r}") from error
    if not isinstance(content, str):
        raise _Failed("the answer holds no text")
    text = content.rpartition("</think>")[2].strip()
    if not text:
        raise _Failed("the answer is empty")
    return text


def _retry_after(header: str | None, otherwise: float) -> float:
    """Seconds that the endpoint asks to wait, at most a minute; dates are ignored."""
    try:
        return min(_MAX_WAIT_S, max(0.0, float(header))) if header else otherwise
    except ValueError:
        return otherwise
