"""Rows that are several sequences, or one that is read rather than continued, to tokens and notes.

Answers are rendered by the chat encoder, so a sequence (prefix and part) has the very tokens that supervised tuning
would train on. The prefix is what all sequences of a unit begin with, and never reaches a token that is trained.

Knows nothing of what a method does with a unit.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from swift.core.errors import DataError, UsageError
from swift.data.columns import Layout
from swift.data.encoding.closed_texts import ClosedText, ClosedTexts
from swift.data.encoding.encode import ChatEncoder, Encoded
from swift.data.labels import OUTSIDE, LabelSpace
from swift.data.rows import Row, RowProblem, RowRef
from swift.data.token_files.identity import combined
from swift.data.units import Kind, Unit

UNIT_VERSION = 2  # part of the fingerprint: raise it when the same row would come out as another unit
_NO_LIMIT = 1 << 30
_NOWHERE = RowRef("", 0)
_READ = {"last": slice(-1, None), "cls": slice(0, 1), "mean": slice(None)}
_JUDGE = "<Instruct>: {instruction}\n\n<Query>: {query}\n\n<Document>: {document}"


@dataclass(frozen=True)
class Judging:
    """How a generative reranker is asked about a document.

    Attributes:
        yes, no: the answers, whose first tokens are compared.
        form: the user's text, with {instruction}, {query} and {document}; the default is that of Qwen3-Reranker.
        instruction: what fits into the form.
    """

    yes: str = "yes"
    no: str = "no"
    form: str = _JUDGE
    instruction: str = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(slots=True)
class _Part:
    """A whole sequence, before what it shares with others is told apart."""

    input_ids: np.ndarray
    loss_weights: np.ndarray
    kind: Kind

    @property
    def first_trained(self) -> int:
        return int(np.argmax(self.loss_weights > 0)) if self.loss_weights.any() else len(self.input_ids)


class UnitEncoder:
    """Encodes rows of one layout (all but `chat`) with the tokenizer and settings of a chat encoder.

    What comes out of each row:
        pairs: a unit (CHOSEN, REJECTED) for each rejected answer; values: the margin, if the row has one.
        binary: one part, CHOSEN where the label is true, else REJECTED; the prefix is all before the first trained
            token.
        prompts: a part CHOSEN with the row's answer; without one, a part PLAIN that is the last token of the prompt
            (its weight only keeps the row). With a teacher's prompt, a further part PLAIN: that prompt, and the same
            answer.
        labelled: a part PLAIN; its last token, eos, has weight 1; values: the label's numbers.
        tokens: a part PLAIN; weight 1 on the first token of each word, or on each token of the text where spans are
            labelled; values: the label of each such token.
        embedding: parts ANCHOR, POSITIVE..., NEGATIVE..., each a text of its own ended by eos; values: a similarity.
        rerank: parts POSITIVE..., NEGATIVE..., each the query and a document, ended by eos; with `judging`, ended by
            the token with which the model says yes or no.

    Args:
        chat: its `max_length` limits each sequence.
        layout: of the rows.
        labels: of `labelled` and `tokens`.
        judging: rerank: the model answers with a word.
        need_negatives: rerank and embedding: refuse rows without a negative.
        pooling: labelled, rerank and embedding: which tokens of a text are read, and so have weight 1: the `last` one,
            the first one (`cls`), or all (`mean`).
        most: rerank and embedding: positives and negatives of a row that are used at most; which ones is drawn with
            `seed` and the row's own text. None: all.

    Raises:
        UsageError: settings that contradict each other; the two words of `judging` begin with the same token.
    """

    def __init__(
        self,
        chat: ChatEncoder,
        layout: Layout,
        *,
        labels: LabelSpace | None = None,
        judging: Judging | None = None,
        need_negatives: bool = False,
        pooling: Literal["last", "mean", "cls"] = "last",
        most: tuple[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        if layout in ("labelled", "tokens") and labels is None:
            raise ValueError(f"layout {layout} needs labels")
        self.limit = chat.config.max_length
        self.strategy = chat.config.truncation_strategy
        if self.strategy == "split" or (self.strategy == "right" and judging):
            why = "a sequence can't be cut into pieces" if self.strategy == "split" else "it would cut off the answer"
            raise UsageError(
                f"--truncation_strategy {self.strategy} doesn't go with rows of this kind: {why}",
                where="--truncation_strategy",
                fix="use delete or left",
            )
        self.layout = layout
        self.labels = labels
        self.judging = judging
        self.need_negatives = need_negatives
        self.pooling, self.most, self.seed = pooling, most, seed
        self._settings_of = chat
        self.chat = copy(chat)  # the same tokenizer, counts and caches
        self.chat.config = replace(chat.config, max_length=_NO_LIMIT, truncation_strategy="delete")
        self.closed = ClosedTexts(self.chat)
        self.vocab_size = chat.vocab_size
        self.template = chat.template
        self.counts: Counter[str] = chat.counts
        self.notices = chat.notices
        self.word_ids = self._word_ids() if judging else None

    # --- what the pipeline asks ---

    def encode_batch(self, rows: Sequence[Row]) -> list[list[Encoded] | RowProblem]:
        """The units of each row in order; a row that can't be used comes back as its problem.

        Raises:
            DataError: a sequence over max_length with `--truncation_strategy raise`.
        """
        asked: list[list[Row] | RowProblem] = []
        if self.most is not None:
            rows = [_drawn(row, self.most, self.seed) for row in rows]
        for row in rows:
            try:
                asked.append(self._sequences(row))
            except RowProblem as problem:
                asked.append(problem)
        flat = [each for each_row in asked if isinstance(each_row, list) for each in each_row]
        told = iter(self._encode(flat))
        outcomes: list[list[Encoded] | RowProblem] = []
        for row, each_row in zip(rows, asked, strict=True):
            if isinstance(each_row, RowProblem):
                outcomes.append(each_row)
                continue
            answers = [next(told) for _ in each_row]
            bad = next((answer for answer in answers if isinstance(answer, RowProblem)), None)
            try:
                outcomes.append(bad or self._units(row, answers))
            except RowProblem as problem:
                outcomes.append(problem)
        return outcomes

    def encode(self, row: Row) -> list[Encoded]:
        """The units of one row. Raises RowProblem when it can't be used."""
        outcome = self.encode_batch([row])[0]
        if isinstance(outcome, RowProblem):
            raise outcome
        return outcome

    def stop_token_ids(self) -> list[int]:
        """Ids that end an answer."""
        return self.chat.stop_token_ids()

    def fingerprint(self) -> str:
        """A hash that changes whenever the unit of some row could."""
        return combined({"tokenizer": self.tokenizer_parts(), "settings": self.settings(), "dated": self.dated()})

    def tokenizer_parts(self) -> dict[str, str]:
        """As the chat encoder's."""
        return self._settings_of.tokenizer_parts()

    def settings(self) -> dict[str, Any]:
        """The chat encoder's, and what decides the units."""
        unit: dict[str, Any] = {"version": UNIT_VERSION, "layout": self.layout, "need_negatives": self.need_negatives}
        if self.labels:
            unit["labels"] = asdict(self.labels)
        if self.judging:
            unit["judging"] = asdict(self.judging)
        if self.pooling != "last":
            unit["pooling"] = self.pooling
        if self.most is not None:
            unit["drawn"] = [*self.most, self.seed]
        return {**self._settings_of.settings(), "unit": unit}

    def dated(self) -> list[list[str]]:
        """As the chat encoder's."""
        return self._settings_of.dated()

    # --- rows to sequences ---

    def _sequences(self, row: Row) -> list[Row]:
        """The conversation or text of each sequence that the row needs."""
        if self.layout == "pairs":
            head = row.messages[: row.answer_at]
            return [row, *(replace(row, messages=[*head, *answer]) for answer in row.rejected)]
        if self.layout in ("embedding", "rerank"):
            if self.need_negatives and not row.negatives:
                raise RowProblem("no_negatives", "the row has no negative text", 'give it "negative_messages"')
            found = [(text, True) for text in row.positives] + [(text, False) for text in row.negatives]
            if self.layout == "embedding":
                return [row, *(replace(row, messages=text, tools=None) for text, _ in found)]
            return [replace(row, messages=self._asked(row, *each)) for each in found]
        if self.layout == "tokens" and row.words is not None:
            return [replace(row, messages=[{"role": "user", "content": " ".join(row.words)}])]
        if self.layout == "prompts" and row.teacher_prompt is not None:
            return [row, replace(row, messages=_for_teacher(row))]
        return [row]

    def _asked(self, row: Row, document: list[dict], fits: bool) -> list[dict]:
        if self.judging is None:
            return [*row.messages, *document]
        words = {"query": row.messages[-1]["content"], "document": document[-1]["content"]}
        text = self.judging.form.format(instruction=self.judging.instruction, **words)
        return [
            *row.messages[:-1],
            {"role": "user", "content": text},
            {"role": "assistant", "content": self.judging.yes if fits else self.judging.no},
        ]

    def _encode(self, rows: list[Row]) -> list[Any]:
        """`Encoded` of each conversation, or `ClosedText` of each text, or its problem."""
        if self.layout in ("labelled", "tokens", "embedding") or (self.layout == "rerank" and not self.judging):
            return list(self.closed.encode_batch(rows, offsets=self.layout == "tokens"))
        told = iter(self.chat.encode_batch([row for row in rows if self._answered(row)]))
        outcomes: list[Any] = []
        for row in rows:
            if not self._answered(row):
                outcomes.append(self._prompt(row))
                continue
            outcome = next(told)
            one = isinstance(outcome, RowProblem) or len(outcome) == 1
            outcomes.append((outcome if isinstance(outcome, RowProblem) else outcome[0]) if one else _several())
        return outcomes

    def _answered(self, row: Row) -> bool:
        return self.layout != "prompts" or row.messages[-1]["role"] == "assistant"

    def _prompt(self, row: Row) -> Encoded | RowProblem:
        try:
            ids = np.array(self.chat.encode_prompt(row.messages, row.tools, row.template_kwargs), dtype=np.int32)
        except RowProblem as problem:
            return problem
        weights = np.zeros(len(ids), dtype=np.float32)
        weights[-1:] = 1.0
        return Encoded(ids, weights)

    # --- sequences to units ---

    def _units(self, row: Row, answers: list[Any]) -> list[Encoded]:
        if self.layout == "pairs":
            return self._pairs(row, answers)
        if self.layout == "binary":
            return [self._unit(row, [_part(answers[0], Kind.CHOSEN if row.label else Kind.REJECTED)])]
        if self.layout == "prompts":
            kinds = [Kind.CHOSEN if self._answered(row) else Kind.PLAIN, Kind.PLAIN]
            return [self._unit(row, [_part(answer, kind) for answer, kind in zip(answers, kinds)])]
        if self.layout == "labelled":
            assert self.labels is not None
            return [self._read(row, answers, [Kind.PLAIN], self.labels.values(row.label), share=False)]
        if self.layout == "tokens":
            return [self._token_unit(row, answers[0])]
        kinds = [Kind.POSITIVE] * len(row.positives) + [Kind.NEGATIVE] * len(row.negatives)
        values = () if row.label is None else (float(row.label),)
        if self.layout == "embedding":
            return [self._read(row, answers, [Kind.ANCHOR, *kinds], values, share=False)]
        if self.judging is None:
            return [self._read(row, answers, kinds, values, share=True)]
        return [self._unit(row, [self._judged(answer, kind) for answer, kind in zip(answers, kinds)], values)]

    def _pairs(self, row: Row, answers: list[Encoded]) -> list[Encoded]:
        chosen, *others = (
            _part(answer, Kind.CHOSEN if number == 0 else Kind.REJECTED) for number, answer in enumerate(answers)
        )
        units = []
        for number, other in enumerate(others):
            if np.array_equal(chosen.input_ids, other.input_ids):
                raise RowProblem("identical", "the chosen and the rejected answer have the same tokens", "remove it")
            values = (row.margins[number],) if row.margins else ()
            units.append(self._unit(row, [chosen, other], values))
        return units

    def _unit(self, row: Row, parts: list[_Part], values: tuple[float, ...] = ()) -> Encoded:
        """Conversations, cut to max_length: from the left all alike, from the right each by itself."""
        prefix = _shared(parts)
        longest = max(len(part.input_ids) for part in parts)
        cut = max(0, longest - self.limit)
        truncated = 0
        if cut:
            self._refuse_long(row, longest)
        if cut and self.strategy == "left":
            bos = int(parts[0].input_ids[0] == self.chat.tokenizer.bos_token_id)
            if cut > prefix - max(bos, 1):
                raise _too_long(longest, self.limit, "and it is too long without the prompt")
            keep = [np.r_[0:bos, bos + cut : len(part.input_ids)] for part in parts]
            parts = [_Part(p.input_ids[k], p.loss_weights[k], p.kind) for p, k in zip(parts, keep)]
            prefix -= cut
            truncated = cut
        elif cut:
            truncated = sum(max(0, len(part.input_ids) - self.limit) for part in parts)
            parts = [_Part(p.input_ids[: self.limit], p.loss_weights[: self.limit], p.kind) for p in parts]
            if not all(part.loss_weights.any() for part in parts):
                raise RowProblem(
                    "masked_by_truncation", f"cut to max_length {self.limit}, no trained token is left of a sequence"
                )
            if len(parts) == 2 and np.array_equal(parts[0].input_ids, parts[1].input_ids):
                raise RowProblem("identical", f"cut to max_length {self.limit}, both answers have the same tokens")
            prefix = _shared(parts)
        return _assembled(parts, prefix, values, truncated)

    def _read(
        self, row: Row, texts: list[ClosedText], kinds: list[Kind], values: tuple[float, ...], *, share: bool
    ) -> Encoded:
        """Texts that are read, each cut to max_length by itself."""
        parts = []
        truncated = 0
        for text, kind in zip(texts, kinds, strict=True):
            ids = text.input_ids[self._kept(row, len(text.input_ids), text.input_ids[0])]
            truncated += len(text.input_ids) - len(ids)
            weights = np.zeros(len(ids), dtype=np.float32)
            weights[_READ[self.pooling]] = 1.0
            parts.append(_Part(ids, weights, kind))
        return _assembled(parts, _shared(parts) if share else 0, values, truncated)

    def _token_unit(self, row: Row, text: ClosedText) -> Encoded:
        assert self.labels is not None
        kept = self._kept(row, len(text.input_ids), text.input_ids[0])
        marks = self._word_marks(row, text) if row.words is not None else self._span_marks(row, text)
        weights = np.zeros(len(text.input_ids), dtype=np.float32)
        weights[list(marks)] = 1.0
        values = tuple(float(self.labels.number(marks[token])) for token in kept.tolist() if token in marks)
        if not values:
            raise RowProblem("masked_by_truncation", f"cut to max_length {self.limit}, no labelled token is left")
        part = _Part(text.input_ids[kept], weights[kept], Kind.PLAIN)
        return _assembled([part], 0, values, len(text.input_ids) - len(kept))

    def _word_marks(self, row: Row, text: ClosedText) -> dict[int, Any]:
        """Token -> label, for the first token of each word."""
        marks: dict[int, Any] = {}
        tokens = [(token, place) for token, place in enumerate(text.offsets) if place is not None]
        at, start = 0, 0
        for number, (word, label) in enumerate(zip(row.words or [], row.label), 1):
            end = start + len(word)
            while at < len(tokens) and tokens[at][1][1] <= start:
                at += 1
            if not word.strip() or at == len(tokens) or tokens[at][1][0] >= end or tokens[at][0] in marks:
                raise RowProblem(
                    "word_without_token", f"word {number} ({word!r}) has no token of its own", "join it to another word"
                )
            marks[tokens[at][0]] = label
            start = end + 1
        return marks

    def _span_marks(self, row: Row, text: ClosedText) -> dict[int, Any]:
        """Token -> label, for every token of the text; a token belongs to the span that its letters lie in."""
        assert self.labels is not None
        content = row.messages[-1]["content"]
        marks: dict[int, Any] = {}
        begun: set[int] = set()
        for token, place in enumerate(text.offsets):
            if place is None:
                continue
            blank = len(content[place[0] : place[1]]) - len(content[place[0] : place[1]].lstrip())
            start = place[0] + (blank if place[0] + blank < place[1] else 0)
            spans = enumerate(row.spans or [])
            inside = next(((n, name) for n, (a, b, name) in spans if start < b and place[1] > a), None)
            if inside is None:
                marks[token] = OUTSIDE
                continue
            number, name = inside
            marks[token] = f"{'I' if number in begun else 'B'}-{name}" if self.labels.bio else name
            begun.add(number)
        lost = [span for number, span in enumerate(row.spans or []) if number not in begun]
        if lost:
            raise RowProblem("bad_span", f"the span {lost[0]} has no token of its own", "join it to its neighbour")
        return marks

    def _judged(self, answer: Encoded, kind: Kind) -> _Part:
        """The sequence up to the token that says yes or no."""
        part = _part(answer, kind)
        end = part.first_trained + 1
        assert self.word_ids is not None
        wanted = self.word_ids[0 if kind == Kind.POSITIVE else 1]
        if part.input_ids[end - 1] != wanted:
            raise RowProblem("word_without_token", "the answer's first token isn't that of the word by itself")
        weights = np.zeros(end, dtype=np.float32)
        weights[-1] = 1.0
        return _Part(part.input_ids[:end], weights, kind)

    def _word_ids(self) -> tuple[int, int]:
        """The first tokens of the two answers, as the template has them."""
        assert self.judging is not None
        ids = []
        for word in (self.judging.yes, self.judging.no):
            talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": word}]
            example = self.chat.encode(Row(_NOWHERE, talk))[0]
            ids.append(int(example.input_ids[np.argmax(example.loss_weights > 0)]))
        self.counts.clear()  # those were no rows
        if ids[0] == ids[1]:
            raise UsageError(
                f"{self.judging.yes!r} and {self.judging.no!r} begin with the same token",
                where="--positive_word",
                fix="choose words that differ in their first token",
            )
        return ids[0], ids[1]

    # --- length ---

    def _kept(self, row: Row, num_tokens: int, first: int) -> np.ndarray:
        """The tokens of a text that stay; its last one always does."""
        cut = num_tokens - self.limit
        if cut <= 0:
            return np.arange(num_tokens)
        self._refuse_long(row, num_tokens)
        if self.strategy == "right":
            return np.r_[0 : self.limit - 1, num_tokens - 1]
        begins = (self.chat.tokenizer.bos_token_id, self.chat.tokenizer.cls_token_id)
        bos = int(first in begins and self.limit > 1)
        return np.r_[0:bos, bos + cut : num_tokens]

    def _refuse_long(self, row: Row, num_tokens: int) -> None:
        if self.strategy == "raise":
            raise DataError(
                f"a sequence of the row has {num_tokens} tokens, max_length is {self.limit}",
                where=str(row.ref),
                fix="raise --max_length or shorten the row",
            )
        if self.strategy == "delete":
            raise _too_long(num_tokens, self.limit)


def _drawn(row: Row, most: tuple[int, int], seed: int) -> Row:
    """The row with so many positives and negatives at most, in their order."""
    if len(row.positives) <= most[0] and len(row.negatives) <= most[1]:
        return row
    text = "\n".join(message["content"] for message in row.messages)
    rng = np.random.default_rng([seed, zlib.crc32(text.encode("utf-8", "surrogatepass"))])

    def some(texts: list[list[dict[str, Any]]], count: int) -> list[list[dict[str, Any]]]:
        chosen = (
            sorted(rng.choice(len(texts), count, replace=False).tolist()) if len(texts) > count else range(len(texts))
        )
        return [texts[number] for number in chosen]

    return replace(row, positives=some(row.positives, most[0]), negatives=some(row.negatives, most[1]))


def _part(encoded: Encoded, kind: Kind) -> _Part:
    """A conversation up to its last trained token: what a template puts behind the answer's end is never asked for, and
    a reward model has to read the end itself, which is what it reads when it is used (`ClosedTexts`)."""
    end = len(encoded.input_ids) - int(np.argmax(encoded.loss_weights[::-1] > 0))
    return _Part(encoded.input_ids[:end], encoded.loss_weights[:end], kind)


def _shared(parts: list[_Part]) -> int:
    """Tokens that all sequences begin with and none trains; each keeps one of its own at least."""
    length = min(min(part.first_trained, len(part.input_ids) - 1) for part in parts)
    first = parts[0].input_ids[:length]
    same = np.ones(length, dtype=bool)
    for part in parts[1:]:
        same &= part.input_ids[:length] == first
    return length if same.all() else int(np.argmin(same))


def _assembled(parts: list[_Part], prefix: int, values: tuple[float, ...], truncated: int) -> Encoded:
    ids = np.concatenate([parts[0].input_ids[:prefix], *(part.input_ids[prefix:] for part in parts)])
    weights = np.concatenate([parts[0].loss_weights[:prefix], *(part.loss_weights[prefix:] for part in parts)])
    lengths = tuple(len(part.input_ids) - prefix for part in parts)
    notes = Unit(prefix, lengths, tuple(int(part.kind) for part in parts), values).notes()
    return Encoded(ids, weights, truncated, notes)


def _for_teacher(row: Row) -> list[dict]:
    """The row's conversation with the teacher's prompt in place of the last question."""
    start = max(number for number, message in enumerate(row.messages) if message["role"] == "user")
    prompt = row.teacher_prompt or []
    head = row.messages[:start] if len(prompt) == 1 and prompt[0]["role"] == "user" else []
    return [*head, *prompt, *row.messages[start + 1 :]]


def _several() -> RowProblem:
    return RowProblem(
        "several_examples",
        "several of its answers are trained, and the history shows one of them in other tokens than it would be "
        "generated in, so the row would be several examples",
        "--loss_scale last_round, or --history_turns mask or keep",
    )


def _too_long(num_tokens: int, limit: int, more: str = "") -> RowProblem:
    what = f"a sequence has {num_tokens} tokens, max_length is {limit}"
    fix = "raise --max_length or shorten the row"
    return RowProblem("too_long", f"{what}, {more}" if more else what, fix, tokens=num_tokens)
