"""A teacher behind an OpenAI-compatible endpoint: token ids go out, its best tokens at each position come back.

`/v1/completions` has two ways of saying what a model thinks of a prompt:

    prompt_logprobs=k      vLLM's own: best tokens by their ids. The one to use.
    echo=true, logprobs=k  OpenAI's first: best tokens by their texts, which are looked up among the student's tokens.
                           Servers that know `return_tokens_as_token_ids` give "token_id:7" instead.

Both say the prompt's own tokens too, and these are compared with what was sent: a server with another tokenizer, or one
that cut the prompt off or put a token in front, is refused. A text that belongs to no token, or to several, is counted
and left to the rest of the distribution. Nothing is called unless a run names an address; the key is read from the
environment, sent in a header, and shown nowhere.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np

from swift.core.errors import ModelError, NetworkError, UsageError
from swift.core.network import require_network
from swift.methods.topk_store import BestTokens

WHERE = "--teacher_model_server"
# nothing that another try would change
_HOPELESS = {
    400: "the request: --gkd_logits_topk may be above its limit (vLLM: --max-logprobs), or the prompt too long",
    401: "the key",
    403: "the key's rights",
    404: "the address or the model's name",
    405: "the address",
    422: "the request: the server may not know prompt_logprobs (try the echo form)",
    **dict.fromkeys((301, 302, 303, 307, 308), "the address"),
}
_MAX_WAIT_S = 60.0
_ID = "token_id:"


_HERE = ("localhost", "127.0.0.1", "::1")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Following one would send the key to whom it names."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _Again(Exception):
    """A failure that may pass."""

    def __init__(self, cause: str, wait_s: float | None = None) -> None:
        super().__init__(cause)
        self.wait_s = wait_s


@dataclass(frozen=True)
class EndpointSettings:
    """Where the teacher is and how it is asked.

    Attributes:
        base_url: address up to /v1. model: its name there.
        k: best tokens at each position.
        form: see the head of this file.
        api_key_env: environment variable that holds the key; None sends none.
        timeout_s: of one answer. retries: further tries after a time-out, a lost connection or HTTP 408, 429 and 5xx.
        backoff_s: wait before the first retry; doubled each time (a Retry-After header wins), at most a minute.
        concurrency: requests at a time.
    """

    base_url: str
    model: str
    k: int = 20
    form: Literal["prompt_logprobs", "echo"] = "prompt_logprobs"
    api_key_env: str | None = None
    timeout_s: float = 120.0
    retries: int = 4
    backoff_s: float = 1.0
    concurrency: int = 8


class TeacherEndpoint:
    """Asks a teacher for its best tokens.

    Args:
        tokenizer: the student's, by which texts become ids; its vocabulary must be the teacher's.

    Attributes:
        counts: "requests", "retries", and "unknown_texts": entries whose text belonged to no token or to several.

    Raises:
        UsageError: a setting can't be, or there is no key.
        NetworkError: the network is forbidden.
    """

    def __init__(self, settings: EndpointSettings, tokenizer: Any) -> None:
        self.settings, self.counts = settings, Counter[str]()
        address = urlsplit(settings.base_url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise UsageError(
                f"{settings.base_url!r} is no address", where=WHERE, fix=f"{WHERE} http://localhost:8000/v1"
            )
        if min(settings.k, settings.concurrency) < 1 or settings.timeout_s <= 0 or settings.retries < 0:
            raise UsageError(
                "k and concurrency must be at least 1, the time-out above 0, retries not below", where=WHERE
            )
        if address.hostname not in _HERE:
            require_network(settings.base_url)
        self._key = None
        if settings.api_key_env is not None:
            self._key = os.environ.get(settings.api_key_env, "").strip()
            if not self._key:
                raise UsageError(
                    f"the environment variable {settings.api_key_env} holds no key",
                    where=WHERE,
                    fix=f"export {settings.api_key_env}=…",
                )
        self._url = settings.base_url.rstrip("/") + "/completions"
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._lock = threading.Lock()
        self._vocab_size = max(tokenizer.get_vocab().values()) + 1
        self._texts: dict[int, str] = {number: tokenizer.decode([number]) for number in tokenizer.get_vocab().values()}
        uses = Counter(self._texts.values())
        self._ids = {text: number for number, text in self._texts.items() if uses[text] == 1}

    def best_tokens(self, sequences: Sequence[Sequence[int]]) -> list[BestTokens]:
        """For each sequence of n ids the best tokens for positions 1 .. n - 1: arrays [n - 1, k], best first.

        Where fewer than k came, the rest are id -1 and -inf.

        Raises:
            ModelError: the teacher has another tokenizer, or its answer isn't understood.
            NetworkError: it can't be reached, or refuses.
        """
        with ThreadPoolExecutor(min(self.settings.concurrency, max(1, len(sequences)))) as pool:
            waiting = [pool.submit(self._one, [int(i) for i in ids]) for ids in sequences]
            try:
                return [future.result() for future in waiting]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _one(self, ids: list[int]) -> BestTokens:
        body: dict[str, Any] = {"model": self.settings.model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        if self.settings.form == "prompt_logprobs":
            body["prompt_logprobs"] = self.settings.k
        else:
            body |= {"echo": True, "logprobs": self.settings.k, "return_tokens_as_token_ids": True}
        answer = self._ask(json.dumps(body).encode())
        try:
            choice = answer["choices"][0]
            if self.settings.form == "prompt_logprobs":
                positions = self._by_ids(ids, choice["prompt_logprobs"])
            else:
                positions = self._by_texts(ids, choice["logprobs"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"the teacher's answer has no log-probabilities of the prompt ({type(error).__name__}: {error})",
                where=self._url,
                fix="it must be a server with prompt_logprobs (vLLM), or with echo and logprobs on /v1/completions",
            ) from error
        shape = (len(ids) - 1, self.settings.k)
        best = BestTokens(np.full(shape, -1, np.int64), np.full(shape, -math.inf, np.float32))
        for row, entries in enumerate(positions):
            first = sorted(entries.items(), key=lambda entry: (-entry[1], entry[0]))[: self.settings.k]
            best.ids[row, : len(first)] = [number for number, _ in first]
            best.logps[row, : len(first)] = [logp for _, logp in first]
        return best

    def _by_ids(self, ids: list[int], positions: Sequence[Mapping[str, Any] | None]) -> list[dict[int, float]]:
        """vLLM: a list with, for each token of the prompt but the first, {"id": {"logprob", "decoded_token"}}."""
        if len(positions) != len(ids):
            raise self._other(f"it counts {len(positions)} tokens in a prompt of {len(ids)}")
        found = []
        for place, (number, entries) in enumerate(zip(ids[1:], positions[1:], strict=True), 1):
            if not entries:
                raise ValueError(f"nothing at position {place}")
            if str(number) not in entries:
                raise self._other(f"the prompt's token {place}, id {number}, isn't what it read there")
            theirs = entries[str(number)].get("decoded_token")
            if theirs is not None and not self._same_text(number, theirs):
                raise self._other(f"id {number} is {theirs!r} for it and {self._texts.get(number)!r} for the student")
            logps = {int(key): float(entry["logprob"]) for key, entry in entries.items()}
            found.append({key: logp for key, logp in logps.items() if self._is_ours(key)})
        return found

    def _by_texts(self, ids: list[int], logprobs: Mapping[str, Any]) -> list[dict[int, float]]:
        """`tokens` and `top_logprobs`, of the prompt's tokens and then of those that were generated."""
        tokens, tops = logprobs["tokens"], logprobs["top_logprobs"]
        if len(tokens) < len(ids) or len(tops) < len(ids):
            raise self._other(f"it counts {len(tokens)} tokens in a prompt of {len(ids)}, one of which it should add")
        for place, (number, text) in enumerate(zip(ids, tokens, strict=False)):
            right = text == f"{_ID}{number}" if text.startswith(_ID) else self._same_text(number, text)
            if not right:
                ours = self._texts.get(number)
                raise self._other(
                    f"the prompt's token {place} is {text!r} for it and {ours!r} (id {number}) for the student"
                )
        found = []
        for number, entries, own in zip(ids[1:], tops[1:], logprobs["token_logprobs"][1:], strict=False):
            best: dict[int, float] = {}
            for text, logp in entries.items():
                key = int(text.removeprefix(_ID)) if text.startswith(_ID) else self._ids.get(text)
                if key is None and text == self._texts.get(number) and logp == own:
                    key = number  # several tokens have this text, and this is the one that was sent
                if key is None:
                    self._count("unknown_texts")
                elif self._is_ours(key):
                    best[key] = float(logp)
            found.append(best)
        return found

    def _is_ours(self, number: int) -> bool:
        """Whether an id is one that the tokenizers have; a padding column's probability is left to the rest."""
        return 0 <= number < self._vocab_size

    def _same_text(self, number: int, text: str) -> bool:
        """Whether a token's text is the student's. Parts of characters are shown in many ways, so they prove nothing;
        white space at the ends may be left out."""
        ours = self._texts.get(number)
        return ours is not None and ("\ufffd" in ours + text or ours.strip() == text.strip() or not text)

    def _other(self, what: str) -> ModelError:
        return ModelError(
            f"the teacher has another tokenizer than the student: {what}",
            where=self._url,
            fix="take a teacher of the student's family, and a server that adds no token to a prompt of ids",
        )

    # --- asking ---

    def _ask(self, body: bytes) -> dict[str, Any]:
        """One answer, after as many tries as it takes."""
        cause = ""
        for attempt in range(self.settings.retries + 1):
            self._count("requests")
            try:
                return self._try(body)
            except _Again as failure:
                cause, asked = str(failure), failure.wait_s
            if attempt < self.settings.retries:
                self._count("retries")
                time.sleep(min(_MAX_WAIT_S, self.settings.backoff_s * 2**attempt if asked is None else asked))
        raise NetworkError(
            f"the teacher gave no answer in {self.settings.retries + 1} tries: {cause}",
            where=self._url,
            fix="look at the server's log; a longer time-out or fewer requests at a time may help",
        )

    def _try(self, body: bytes) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            call = urllib.request.Request(self._url, body, headers)
            with self._opener.open(call, timeout=self.settings.timeout_s) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            cause = f"HTTP {error.code}: {self._without_key(error.read()[:300].decode(errors='replace').strip())}"
            if error.code in (408, 429) or error.code >= 500:
                raise _Again(cause, _seconds(error.headers.get("Retry-After"))) from error
            fix = f"correct {_HOPELESS.get(error.code, 'what it complains of')}"
            raise NetworkError(f"the teacher refuses ({cause})", where=self._url, fix=fix) from error
        except (OSError, http.client.HTTPException) as error:  # refused, reset, timed out, cut off
            raise _Again(str(getattr(error, "reason", "") or error or type(error).__name__)) from error
        except ValueError as error:
            raise ModelError(f"the teacher's answer is no JSON: {error}", where=self._url) from error

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "…") if self._key else text

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1


def _seconds(header: str | None) -> float | None:
    """What a Retry-After header asks for; dates are ignored."""
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:
        return None


def served_model(base_url: str, api_key_env: str | None = None) -> str:
    """The name of the first model that an endpoint serves.

    Args:
        base_url: address up to /v1. api_key_env: environment variable that holds the key; None sends none.

    Raises:
        NetworkError: it doesn't answer, or serves none; or the network is forbidden.
    """
    url = f"{base_url}/models"
    if urlsplit(url).hostname not in _HERE:
        require_network(base_url)
    headers = {"Authorization": f"Bearer {os.environ[api_key_env]}"} if api_key_env else {}
    opener = urllib.request.build_opener(_NoRedirects())  # another host must not get the key
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError, http.client.HTTPException) as error:
        raise NetworkError(
            f"the teacher's endpoint doesn't say which model it serves: {error}",
            where=url,
            fix="name the address of an OpenAI-like API up to /v1, such as http://localhost:8000/v1",
        ) from error
