"""Texts to token ids, fast where that is proven to give the same ids.

`tokenizers` is the reference. `gigatoken`, when installed, is some forty times faster; it is used for a batch only if

- it gave the reference's ids for a fixed set of awkward texts (once per process),
- the batch is large enough for its start-up to pay,
- and a sample of that very batch (about 0.5 %) comes out the same from both.

Else the reference does the whole batch. Texts that contain the string of an added token (`<|im_end|>`) always go to the
reference, which reads such a string as that token; both paths therefore treat it alike. Every decision is a function
of the batch, so the number of processes changes neither ids nor counts.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from swift.core.logging import get_logger
from swift.data.encoding.tokens import added_token_pattern

log = get_logger("data")

# below this many characters a batch goes to the reference
LEAST_CHARACTERS = 1 << 16
_SLICE = 2048
_SAMPLE_EVERY = 400_000  # characters for each slice that is compared


class Engine(Protocol):
    """Another tokeniser of the same vocabulary; gives ids without what is put around a text."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...


class FastTokenizer:
    """Encodes plain texts with a transformers tokenizer (a fast one).

    Args:
        tokenizer: not changed; its added tokens must not change afterwards.
        engine: what to use instead of gigatoken, for tests and other engines; None looks for gigatoken.

    Attributes:
        why_not: why the fast path is off; None while it is on or undecided.
        counts: texts by what became of them: `tokenised_fast`, `tokenised_reference`, `added_in_text` (holds the string
            of an added token, so the reference did it) and `fast_path_differed` (texts of batches whose sample
            differed; the reference did them).
    """

    def __init__(self, tokenizer: Any, engine: Engine | None = None) -> None:
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        self.why_not: str | None = None
        self.counts: Counter[str] = Counter()
        self._engine = engine
        self._ready = False
        self._added = added_token_pattern(tokenizer)
        names = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        # every added token begins with one of these; looking for them first is much faster than the pattern
        self._beginnings = sorted({name[:2] for name in names if name.strip()})
        self._around: dict[bool, tuple[np.ndarray, np.ndarray]] = {False: (_NONE, _NONE)}

    def __getstate__(self) -> dict[str, Any]:
        """For a worker process, which starts the engine itself (a given engine travels along)."""
        engine = None if isinstance(self._engine, _Gigatoken) else self._engine
        return {**self.__dict__, "_engine": engine, "_ready": False}

    def encode_batch(self, texts: Sequence[str], *, special: bool = True) -> list[np.ndarray]:
        """The ids of each text, int32 [n], exactly those of the reference.

        Args:
            special: add what the tokenizer puts around a text (bos, eos).
        """
        characters = sum(map(len, texts))
        plain = [i for i, text in enumerate(texts) if not self._has_added(text)]
        found: dict[int, np.ndarray] = {}
        if characters >= LEAST_CHARACTERS and plain and self._start():
            fast = self._fast([texts[i] for i in plain])
            if fast is None:
                self.counts["fast_path_differed"] += len(plain)
            else:
                self.counts["tokenised_fast"] += len(plain)
                before, after = self._put_around(special)
                if len(before) or len(after):
                    fast = [np.concatenate([before, ids, after]) for ids in fast]
                found = dict(zip(plain, fast))
        rest = [i for i in range(len(texts)) if i not in found]
        if len(plain) < len(texts):
            self.counts["added_in_text"] += len(texts) - len(plain)
        self.counts["tokenised_reference"] += len(rest)
        found.update(zip(rest, self.reference([texts[i] for i in rest], special=special)))
        return [found[i] for i in range(len(texts))]

    def reference(self, texts: Sequence[str], *, special: bool) -> list[np.ndarray]:
        """The ids that `tokenizers` gives, int32."""
        if self.backend.truncation is not None:
            self.backend.no_truncation()
        if self.backend.padding is not None:
            self.backend.no_padding()
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=special)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def report(self) -> dict[str, Any]:
        """What became of the texts so far, and why the fast path is off if it is."""
        return {**+self.counts, **({"why_not": self.why_not} if self.why_not else {})}

    # --- the fast path ---

    def _has_added(self, text: str) -> bool:
        return any(beginning in text for beginning in self._beginnings) and self._added.search(text) is not None

    def _put_around(self, special: bool) -> tuple[np.ndarray, np.ndarray]:
        """What the tokenizer puts before and after a text."""
        if special not in self._around:
            (encoding,) = self.backend.encode_batch(["a"], add_special_tokens=True)
            mask = encoding.special_tokens_mask
            before, after = len(list(takewhile(bool, mask))), len(list(takewhile(bool, reversed(mask))))
            ids = np.array(encoding.ids, dtype=np.int32)
            self._around[special] = (ids[:before], ids[len(ids) - after :])
        return self._around[special]

    def _start(self) -> bool:
        """Whether the fast path can be used in this process."""
        if not self._ready:
            self._ready = True
            self.why_not = self._prepare()
            if self.why_not:
                log.debug("texts are tokenised by the reference alone: %s", self.why_not)
        return self.why_not is None

    def _prepare(self) -> str | None:
        rules = json.loads(self.backend.to_str())
        changes_text = any(step["type"] != "NFC" for step in _steps(rules.get("normalizer")))
        if changes_text and any(token["normalized"] and token["content"].strip() for token in rules["added_tokens"]):
            return "its normaliser may make added tokens out of other text"
        if self._engine is None:
            if importlib.util.find_spec("gigatoken") is None:
                return 'gigatoken is not installed (pip install "swift-llm[data]")'
            try:
                self._engine = _Gigatoken(self.backend.to_str())
            except Exception as error:  # a young library at its border: anything it raises means "not this tokenizer"
                return f"gigatoken can't read this tokenizer: {error}"
        texts = [text for text in awkward_texts() if not self._has_added(text)]
        reference = self.reference(texts, special=False)
        fast = self._engine.encode_batch(texts)
        bad = next((text for text, a, b in zip(texts, reference, fast, strict=True) if not np.array_equal(a, b)), None)
        return None if bad is None else f"it differs from the reference on {bad[:40]!r}"

    def _fast(self, texts: list[str]) -> list[np.ndarray] | None:
        """The engine's ids; None if a sample of this batch differs from the reference."""
        assert self._engine is not None
        whole, slices = _sample(texts)
        found = self._engine.encode_batch([*texts, *slices])
        expected = self.reference([*(texts[i] for i in whole), *slices], special=False)
        compared = [*(found[i] for i in whole), *found[len(texts) :]]
        if all(np.array_equal(a, b) for a, b in zip(expected, compared, strict=True)):
            return found[: len(texts)]
        return None


class _Gigatoken:
    """gigatoken behind the small protocol."""

    def __init__(self, tokenizer_json: str) -> None:
        import gigatoken

        self._tokenizer = gigatoken.Tokenizer.from_json(tokenizer_json)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        layout = self._tokenizer.encode_batch(list(texts)).layout
        ids = np.asarray(layout.content.data).astype(np.int32)
        starts, stops = np.asarray(layout.starts.data).tolist(), np.asarray(layout.stops.data).tolist()
        return [ids[start:stop] for start, stop in zip(starts, stops)]


_NONE = np.empty(0, np.int32)


def _steps(normaliser: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normaliser, sequences opened."""
    if normaliser is None:
        return []
    if normaliser["type"] == "Sequence":
        return [step for inner in normaliser["normalizers"] for step in _steps(inner)]
    return [normaliser]


def _sample(texts: Sequence[str]) -> tuple[list[int], list[str]]:
    """Texts to compare whole (by number) and pieces of long ones: a function of the batch."""
    ends = np.cumsum([len(text) for text in texts])
    total = int(ends[-1])
    whole: list[int] = []
    slices: list[str] = []
    for number in range(max(1, total // _SAMPLE_EVERY)):
        key = hashlib.blake2b(f"{total} {len(texts)} {number}".encode(), digest_size=8).digest()
        place = int.from_bytes(key, "little") % max(1, total)
        index = int(np.searchsorted(ends, place, side="right"))
        text = texts[index]
        if len(text) <= _SLICE:
            whole.append(index)
        else:
            start = min(place - int(ends[index]) + len(text), len(text) - _SLICE)
            slices.append(text[start : start + _SLICE])
    return whole, slices


def awkward_texts() -> list[str]:
    """Texts on which tokenisers have been seen to disagree: white space, scripts, combining marks, control characters,
    digits, contractions, and random mixtures of them. The same ones every time."""
    pieces = [
        *("", " ", "  ", "\n", "\n\n \n", "\r\n\r\n", "\t\tx", "a  b   c    d", " leading", "trailing  "),
        *("\u00a0\u2003x\u3000", "It's we'LL they'Ve I'd 's 'S", "3.14159 1234567890 12,345 1e-9 ０１２ ٣٤"),
        *("def f(x):\n\treturn {**x, 'a': [1, 2]}", "naïve café Ångström ﬁ ﬂ ½", "Привет, мир! Ёлка"),
        *("今天天气很好。东京タワー한국어", "ภาษาไทยไม่มีช่องว่าง", "שלום العربية हिन्दी தமிழ்"),
        *("\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f44d\U0001f3fd", "\U0001d4b3 \U00010348"),
        *("\x00\x01\x07\x1b[0m\x7f\x85", "\ufeffbom \ufffd \u200b\u200d\u2028\u2029", "a\u0301\u0323 e\u0327\u0301"),
        *("https://example.org/a?b=c&d=%20#e", "----====****####", "A" * 300, "ab" * 200, "0" * 70, "snakeCase SCREAM"),
    ]
    rng = random.Random(20)
    alphabet = [piece for piece in pieces if piece]
    for _ in range(60):
        mixed = "".join(rng.choice(alphabet)[: rng.randint(1, 9)] for _ in range(rng.randint(2, 30)))
        pieces += [mixed, unicodedata.normalize("NFD", mixed)]
    for _ in range(20):
        codes = rng.choice((rng.randrange(0x20, 0x250), rng.randrange(0x250, 0xD7FF), rng.randrange(0xE000, 0x1FFFF)))
        pieces.append("".join(chr(codes + i * 7) for i in range(12) if not 0xD800 <= codes + i * 7 <= 0xDFFF))
    return pieces
