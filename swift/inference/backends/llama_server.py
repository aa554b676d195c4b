"""llama.cpp's own server, which runs somewhere already (`--engine_url`), spoken to in tokens by its `/completion`.

What its settings don't mean as ours do is refused by name: its presence and frequency penalties count the prompt as
well, an end that is ignored there can't be chosen, and nothing keeps an answer from ending early. A token that ends in
the middle of a character never appears in its stream (as of build 11549): it is told from the bytes of what follows,
where only one token is possible.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swift.core.errors import SwiftError, UsageError
from swift.inference.backends.base import Feature, ModelInfo
from swift.inference.backends.dialect import Call, Enough, Reader, most_tokens, seed_number
from swift.inference.backends.served import Project, served_backend
from swift.inference.decoding import AnswerText
from swift.inference.requests import Request, SamplingParams, TokenLogprob, Update

if TYPE_CHECKING:
    from swift.inference.backends.http import HttpBackend
    from swift.inference.loading import Prepared

_FEATURES: frozenset[Feature] = frozenset({"logprobs", "penalties", "logit_bias", "min_p"})
_SAMPLERS = ["penalties", "temperature", "top_k", "top_p", "min_p"]  # our order; its own has temperature last
_ALL = 1 << 20  # tokens that a penalty looks back to, more than any context has
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def server_backend(prepared: Prepared) -> HttpBackend:
    """The server that `--engine_url` names; it isn't started yet.

    Raises:
        UsageError: settings that mean nothing for a server that runs already.
    """
    project = Project(
        name="llamacpp",
        title="llama-server",
        package="llama_cpp",
        dialect=LlamaServer(prepared.tokenizer, prepared.stop_token_ids()),
        features=_FEATURES,
        own_features=frozenset(),
        command=lambda launch: ("llama-server",),  # never: it runs already
    )
    return served_backend(project, prepared)


class LlamaServer:
    """See `Dialect`. Text is made of the tokens here, so that it is what other backends make of them.

    Args:
        tokenizer: of the model.
        stop_token_ids: what ends an answer unless a request says otherwise.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = frozenset(stop_token_ids)
        self._special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))

    def question(self, request: Request, model: str, info: ModelInfo) -> Call:
        _refuse_others(request.params)
        return Call("/completion", completion_body(request, info))

    def reader(self, request: Request) -> Reader:
        params = request.params
        ends = self._stops | frozenset(params.stop_token_ids)
        # a stop word that is a special token never shows in the text
        words = {self._special[word]: word for word in params.stop if word in self._special}
        text = AnswerText(self._tokenizer, params.stop, skip_special_tokens=params.skip_special_tokens)
        seen = 0

        def read(chunk: dict[str, Any]) -> Iterator[Update]:
            nonlocal seen
            update = Update(request.id, num_prompt_tokens=len(request.prompt))
            if chunk.get("stop"):
                if int(chunk.get("tokens_predicted", seen)) > seen:
                    raise SwiftError("llama-server ended within a character, whose tokens it doesn't tell")
                update.finish_reason = "length" if chunk.get("stop_type") == "limit" else "stop"
                update.text = text.flush()
                yield update
                return
            if "tokens" not in chunk:
                raise ValueError("it gives no tokens back (return_tokens)")
            if not chunk["tokens"]:
                return
            entries = chunk["completion_probabilities"]
            lost = int(chunk["tokens_predicted"]) - seen - len(entries)
            update.tokens = [*self._lost(entries, lost), *chunk["tokens"]]
            seen += len(update.tokens)
            if params.logprobs is not None:
                if lost > 0:
                    raise SwiftError("llama-server leaves out log-probabilities of tokens within a character")
                update.logprobs = [_logprob(entry, params.logprobs) for entry in entries]
            last = update.tokens[-1]
            ended = last in ends or last in words
            update.text = "".join(text.push(token) for token in (update.tokens[:-1] if ended else update.tokens))
            if ended or text.stopped_by is not None:
                own = last if last in params.stop_token_ids else None
                update.stop_reason = text.stopped_by if text.stopped_by is not None else words.get(last, own)
                update.finish_reason = "stop"
                update.text += text.flush()
                yield update
                raise Enough
            yield update

        return read

    def cancel(self, request: Request) -> Sequence[Call]:
        return ()  # a closed connection is enough

    def load_adapter(self, name: str, folder: Path) -> Sequence[Call]:
        raise SwiftError("llama-server takes adapters when it starts")

    def unload_adapter(self, name: str) -> Sequence[Call]:
        raise SwiftError("llama-server takes adapters when it starts")

    def update_weights(self, folder: Path) -> Sequence[Call]:
        raise SwiftError("llama-server's weights stay as they are")

    def sleep(self, level: int) -> Sequence[Call]:
        raise SwiftError("llama-server can't be told to sleep")

    def wake(self, level: int) -> Sequence[Call]:
        raise SwiftError("llama-server can't be told to sleep")

    def _lost(self, entries: list[dict[str, Any]], count: int) -> list[int]:
        """The tokens before these that the server left out, as their characters weren't whole.

        Raises:
            SwiftError: they could be several.
        """
        if count <= 0:
            return []
        said = b"".join(bytes(entry["bytes"]) for entry in entries)
        known = b"".join(self._bytes_of.get(entry["id"], b"") for entry in entries)
        ways = list(_ways(said.removesuffix(known), count, self._tokens_of))
        if len(ways) != 1:
            raise SwiftError(
                f"llama-server left out {count} tokens of the bytes {said!r}, and they can't be told",
                fix="run the file without --engine_url",
            )
        return ways[0]

    @cached_property
    def _bytes_of(self) -> dict[int, bytes]:
        """What each token that isn't special stands for."""
        letters = _byte_letters()
        special = frozenset(self._special.values())
        found = {}
        for word, token in self._tokenizer.get_vocab().items():
            if token in special:
                continue
            if byte := _BYTE.fullmatch(word):
                found[token] = bytes([int(byte[1], 16)])
            elif all(letter in letters for letter in word):
                found[token] = bytes(letters[letter] for letter in word)
        return found

    @cached_property
    def _tokens_of(self) -> dict[bytes, list[int]]:
        """Tokens that end within a character, by their bytes."""
        found: dict[bytes, list[int]] = {}
        for token, piece in self._bytes_of.items():
            try:
                piece.decode()
            except UnicodeDecodeError:
                found.setdefault(piece, []).append(token)
        return found


def completion_body(request: Request, info: ModelInfo) -> dict[str, Any]:
    """The JSON of a request to `/completion`."""
    params, most = request.params, most_tokens(request, info)
    body: dict[str, Any] = {
        "prompt": request.prompt,
        "stream": True,
        "return_tokens": True,
        "cache_prompt": True,
        "n_predict": -1 if most is None else most,
        "samplers": _SAMPLERS,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": len(request.prompt) + most if most is not None else _ALL,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": seed_number(params),
        "n_probs": max(1, params.logprobs or 0),  # one at least: the bytes of tokens come with them
        "post_sampling_probs": False,
    }
    if params.logit_bias:
        body["logit_bias"] = [[token, value] for token, value in params.logit_bias]
    return body


def _refuse_others(params: SamplingParams) -> None:
    wrong = {
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "ignore_eos": params.ignore_eos,
        "min_new_tokens": params.min_new_tokens > 0,
    }
    for name in (name for name, asked in wrong.items() if asked):
        raise UsageError(
            f"{name} means something else to llama-server, or nothing",
            where=name,
            fix="leave it out, or run the file without --engine_url",
        )


def _logprob(entry: dict[str, Any], wanted: int) -> TokenLogprob:
    top = sorted(((each["id"], each["logprob"]) for each in entry["top_logprobs"]), key=lambda pair: -pair[1])
    return TokenLogprob(entry["id"], entry["logprob"], tuple(top[:wanted]))


def _ways(left: bytes, count: int, tokens_of: dict[bytes, list[int]]) -> Iterator[list[int]]:
    """All ways to write `left` as `count` tokens, each of which ends within a character."""
    if count == 0:
        if not left:
            yield []
        return
    for length in range(1, len(left) - count + 2):
        for token in tokens_of.get(left[:length], ()):
            for rest in _ways(left[length:], count - 1, tokens_of):
                yield [token, *rest]


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level BPE writes bytes as (GPT-2): printable ones themselves, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + k): byte for k, byte in enumerate(others)}
