"""Paraphrase by a language model behind any endpoint that speaks OpenAI's chat-completions protocol.

Nothing is called unless a recipe names this transform with an address and a model. An answer that has lost a protected
span isn't used.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from swift.config.fields import setting
from swift.core.chat_client import ChatClient, NoAnswer
from swift.core.errors import NetworkError, SwiftError
from swift.data.augment.text import kept_texts
from swift.data.augment.transform import TRANSFORMS, Request, Transform, Unchanged

DEFAULT_PROMPT = (
    "Rewrite the text below in other words. Keep its language, its meaning and its form (a question stays a question). "
    "Keep code, links, numbers, formulas and anything in braces or angle brackets exactly as they are. "
    "Answer with the rewritten text only.\n\n{text}"
)


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
        self._client = ChatClient(
            self.base_url,
            key_env=self.api_key_env,
            timeout_s=self.timeout_s,
            retries=self.retries,
            backoff_s=self.backoff_s,
            where="text.paraphrase_llm.api_key_env",
        )
        self._counted = 0  # of the client's retries

    def rewrite_all(self, requests: list[Request]) -> list[str | Unchanged]:
        bodies = [self._body(request) for request in requests]  # draws here, in order, not in threads
        with ThreadPoolExecutor(min(self.concurrency, len(requests))) as pool:
            waiting = [pool.submit(self._answer, *pair) for pair in zip(requests, bodies)]
            try:
                return [future.result() for future in waiting]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _body(self, request: Request) -> dict[str, Any]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.prompt.replace("{text}", request.text)})
        body: dict[str, Any] = {"model": self.model, "messages": messages, "temperature": self.temperature}
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.send_seed:
            body["seed"] = int(request.rng.integers(1 << 31))
        return body

    def _answer(self, request: Request, body: dict[str, Any]) -> str | Unchanged:
        try:
            answer = self._client.text(body)
        except NoAnswer as failure:
            if self.on_failure == "stop":
                raise SwiftError(
                    f"the endpoint gave no usable answer: {failure}",
                    where=self._client.url,
                    fix='look at the endpoint\'s log; "on_failure": "keep" would keep such texts as they are',
                ) from failure
            return Unchanged("failed")
        if kept_texts(answer, self.kinds) != kept_texts(request.text, self.kinds):
            return Unchanged("protected_span_lost")
        return answer

    def take_counts(self) -> Counter[str]:
        retries, self._counted = self._client.num_retries - self._counted, self._client.num_retries
        return Counter({"retries": retries} if retries else {})
