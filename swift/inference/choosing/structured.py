"""Answers of a given form: a JSON schema, a regular expression, a grammar or a choice decides what may come next.

The grammars are xgrammar's. They are compiled when a request arrives, so that a bad one is refused at once, and kept
for the next request of that form. A grammar that takes too long, to compile or to follow, ends its own request only.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from swift.core.errors import SwiftError, UsageError
from swift.core.extras import require
from swift.inference.choosing.vetting import MAX_SCHEMA_BYTES, refusal, vet_regex, vet_schema
from swift.inference.requests import Structure

_MAX_GRAMMAR_BYTES = 16384
_COMPILE_S = 10.0
_TOKEN_S = 0.25  # CPU time that one token may take; ordinary grammars take some microseconds
_ANSWER_S = 5.0
_CACHED = 128
_CACHED_BYTES = 256 << 20
MAX_SPACES = 64  # consecutive white space in JSON: a model may otherwise go on with it for ever
_PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ", re.MULTILINE)  # what xgrammar's messages begin with


class Structures:
    """Compiles structures for one tokenizer. Any thread may use it.

    Args:
        tokenizer: of transformers.
        vocab_size: columns of the model's scores; may be more than the tokenizer's tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[Structure, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._busy = threading.Semaphore()  # one grammar is compiled at a time
        self._library: Any = None
        self._compiler: Any = None
        self._texts = np.empty(0, dtype=np.int32)
        self._plain = np.empty(0, dtype=np.int32)

    def check(self, structure: Structure) -> None:
        """Compile a structure, unless that has been done.

        Raises:
            UsageError: it is wrong, has rules that can't be kept to, is too large or takes too long.
        """
        self._grammar(structure)

    def begin(self, structure: Structure, ends: frozenset[int]) -> Matcher:
        """What follows one answer.

        Args:
            ends: ids that end the answer; allowed as soon as the answer is complete.
        """
        grammar = self._grammar(structure)
        inside = self._plain if structure.kind in ("json", "json_schema", "tag") else self._texts
        # without ends the tokenizer's own one stands for them; it is never let through
        matcher = self._library.GrammarMatcher(grammar, override_stop_tokens=sorted(ends) or None)
        return Matcher(matcher, inside, _bits(ends, self._vocab_size))

    def _grammar(self, structure: Structure) -> Any:
        with self._lock:
            if structure in self._compiled:
                self._compiled.move_to_end(structure)
                return self._compiled[structure]
            self._prepare()
        grammar = self._compile(structure)
        with self._lock:
            self._compiled[structure] = grammar
            sizes = [each.memory_size_bytes for each in self._compiled.values()]
            while len(self._compiled) > _CACHED or (sum(sizes) > _CACHED_BYTES and len(self._compiled) > 1):
                self._compiled.popitem(last=False)
                del sizes[0]
        return grammar

    def _prepare(self) -> None:
        """Load the library and tell it the vocabulary; once."""
        if self._compiler is not None:
            return
        library = require("xgrammar", extra="serve", purpose="keep answers to a structure")
        found = library.TokenizerInfo.from_huggingface(
            self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=[_some_special(self._tokenizer)]
        )
        # special tokens don't show in the text, so they can't be part of it; no text means: never
        special = set(self._tokenizer.all_special_ids) | {
            place for place, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }
        texts = [b"" if place in special else text for place, text in enumerate(found.decoded_vocab)]
        texts += [b""] * (self._vocab_size - len(texts))
        info = library.TokenizerInfo(
            texts,
            library.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=[_some_special(self._tokenizer)],
            add_prefix_space=found.add_prefix_space,
        )
        self._texts = _bits((place for place, text in enumerate(texts) if text), self._vocab_size)
        # JSON has no control characters inside of strings, and xgrammar lets some through
        plain = (place for place, text in enumerate(texts) if text and not _CONTROLS.intersection(text))
        self._plain = _bits(plain, self._vocab_size)
        self._library = library
        self._compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def _compile(self, structure: Structure) -> Any:
        """Compile, in a thread that is left to itself if it takes too long: it can't be stopped."""
        work = self._work(structure)
        outcome: list[Any] = []
        late = refusal(structure.kind, f"it takes more than {_COMPILE_S:.0f} s to prepare")
        if not self._busy.acquire(timeout=_COMPILE_S):
            raise late

        def run() -> None:
            try:
                outcome.append(work())
            except (RuntimeError, ValueError) as error:  # what xgrammar raises for bad input
                outcome.append(refusal(structure.kind, _reason(error)))
            finally:
                self._busy.release()

        thread = threading.Thread(target=run, name="structure", daemon=True)
        thread.start()
        thread.join(_COMPILE_S)
        if not outcome:
            raise late
        if isinstance(outcome[0], SwiftError):
            raise outcome[0]
        return outcome[0]

    def _work(self, structure: Structure) -> Callable[[], Any]:
        """What compiles a structure that looks sound."""
        kind, value, compiler = structure.kind, structure.value, self._compiler
        if kind == "json":
            return lambda: compiler.compile_json_schema('{"type": "object"}', max_whitespace_cnt=MAX_SPACES)
        if kind == "json_schema":
            schema = vet_schema(value)
            return lambda: compiler.compile_json_schema(schema, max_whitespace_cnt=MAX_SPACES)
        if kind == "regex":
            regex = vet_regex(value)
            return lambda: compiler.compile_regex(regex)
        if kind == "tag":
            return lambda: compiler.compile_structural_tag(value)
        grammar = _choice_grammar(value) if kind == "choice" else value
        limit = MAX_SCHEMA_BYTES if kind == "choice" else _MAX_GRAMMAR_BYTES
        if len(grammar.encode("utf-8", "replace")) > limit:
            raise refusal(kind, f"it is longer than {limit} bytes")
        return lambda: compiler.compile_grammar(grammar)


class Matcher:
    """Follows one answer through its grammar.

    Args:
        matcher: of xgrammar.
        texts: bits of the tokens that have a text.
        ends: bits of those that end the answer.
    """

    def __init__(self, matcher: Any, texts: np.ndarray, ends: np.ndarray) -> None:
        self._matcher = matcher
        self._texts = texts
        self._ends = ends
        self._allowed: np.ndarray | None = None
        self._token_s = self._answer_s = 0.0
        self._ended = False

    @property
    def complete(self) -> bool:
        """Whether the answer has its form and no text can follow."""
        return self._ended or (not self._bits_of(self._texts).any() and bool(self._matcher.is_completed()))

    def mask(self) -> np.ndarray:
        """int32 bits of the tokens that may come next: bit i of word w is token 32 * w + i.

        Raises:
            UsageError: no token may come, or the grammar takes too long to follow.
        """
        allowed = self._bits_of(self._texts | self._ends)
        if not allowed.any():
            raise UsageError("the answer can't go on: no token fits its structure", where="structure")
        return allowed

    def take(self, token: int) -> None:
        """Go on by a token that `mask` allowed."""
        started = time.thread_time()
        accepted = self._matcher.accept_token(token)
        self._token_s = time.thread_time() - started
        if not accepted:
            raise AssertionError(f"token {token} was allowed and doesn't fit the structure")
        self._ended = bool(self._matcher.is_terminated())
        self._allowed = None

    def _bits_of(self, kind: np.ndarray) -> np.ndarray:
        if self._allowed is None:
            self._allowed = np.zeros((1, len(kind)), dtype=np.int32)
            if not self._ended:
                started = time.thread_time()
                self._matcher.fill_next_token_bitmask(torch.from_numpy(self._allowed))
                self._token_s += time.thread_time() - started
                self._answer_s += self._token_s
                if self._token_s > _TOKEN_S or self._answer_s > _ANSWER_S:
                    raise UsageError(
                        "the answer can't go on: its structure takes too long to follow",
                        where="structure",
                        fix="make it less ambiguous: nested repetitions of the same thing are hard",
                    )
        return self._allowed[0] & kind


def apply_masks(scores: torch.Tensor, rows: list[int], masks: list[np.ndarray]) -> None:
    """Make impossible what masks don't allow, in place.

    Args:
        scores: [rows, vocab] fp32.
        rows: which of them.
        masks: for each a `Matcher.mask`.
    """
    bits = np.unpackbits(np.stack(masks).view(np.uint8), axis=1, bitorder="little")[:, : scores.shape[1]]
    allowed = torch.from_numpy(bits).to(scores.device, torch.bool)
    scores[rows] = scores[rows].masked_fill(~allowed, -torch.inf)


_CONTROLS = frozenset(range(32)) - {ord("\n"), ord("\r")}


def _bits(tokens: Any, vocab_size: int) -> np.ndarray:
    """int32 words with the bits of `tokens` set."""
    flags = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    flags[[token for token in tokens if token < vocab_size]] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def _some_special(tokenizer: Any) -> int:
    """xgrammar wants a stop token at any rate; those of the request take its place."""
    return tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0


def _choice_grammar(value: str) -> str:
    """EBNF of one out of several texts, given as a JSON array."""
    try:
        texts = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise refusal("choice", f"it is no JSON array: {error}") from None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise refusal("choice", "it must be a JSON array of texts, none of them empty")
    return "root ::= " + " | ".join(f'"{"".join(map(_escape, text))}"' for text in texts)


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char


def _reason(error: Exception) -> str:
    lines = [line for line in _PLACE.sub("", str(error)).strip().splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
