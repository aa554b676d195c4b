"""Rows that a student and its teacher both read: one unit each, and the two texts that come out of it.

A unit's first part is what the student reads. A further one, where there is one, is what the teacher reads: another
prompt and the same answer, so that both predict the same tokens. Rows may have no answer, if somebody writes one. Knows
nothing of models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from swift.core.errors import UsageError
from swift.data.encoding.encode import Encoded
from swift.data.encoding.units import UnitEncoder
from swift.data.loading.batch import Batch, Examples, Tokens, tokens_of
from swift.data.rows import Row, RowProblem, RowRef
from swift.data.token_files.identity import combined
from swift.data.units import Kind, Unit


@dataclass(frozen=True)
class Wanted:
    """What rows must have.

    Attributes:
        answers: whether each needs an answer of its own.
        other_prompt: whether each needs a prompt that only the teacher sees.
        system: system prompt that only the teacher sees, where a row has no prompt for it.
    """

    answers: bool = True
    other_prompt: bool = False
    system: str | None = None


class DistillEncoder:
    """Encodes rows of the layout `prompts`, and refuses those that can't be distilled from.

    Args:
        units: the encoder of the layout `prompts`.
    """

    def __init__(self, units: UnitEncoder, wanted: Wanted) -> None:
        self.units, self.wanted = units, wanted
        self.template, self.vocab_size = units.template, units.vocab_size
        self.counts: Counter[str] = units.counts
        self.notices: list[str] = units.notices

    def encode_batch(self, rows: Sequence[Row]) -> list[list[Encoded] | RowProblem]:
        """The unit of each row in order; a row that can't be used comes back as its problem."""
        asked = [self._with_prompt(row) for row in rows]
        usable = [row for row in asked if isinstance(row, Row)]
        found = iter(self.units.encode_batch(usable))
        return [self._seen(next(found)) if isinstance(row, Row) else row for row in asked]

    def _with_prompt(self, row: Row) -> Row | RowProblem:
        if self.wanted.answers and row.messages[-1]["role"] != "assistant":
            return RowProblem(
                "no_assistant",
                "the row has no answer, and nobody writes one",
                "give it one; or let the model write them all (--lmbda 1), or the teacher (--seq_kd true)",
            )
        if row.teacher_prompt is None and self.wanted.system is not None:
            row = replace(row, teacher_prompt=_below(self.wanted.system, row.messages))
        if row.teacher_prompt is None and self.wanted.other_prompt:
            return RowProblem(
                "no_teacher_prompt",
                "the model would be its own teacher, asked the same",
                'give the row a "teacher_prompt", or all of them one with --teacher_prompt',
            )
        return row

    def _seen(self, outcome: list[Encoded] | RowProblem) -> list[Encoded] | RowProblem:
        if isinstance(outcome, RowProblem):
            return outcome
        for example in outcome:
            assert example.notes is not None
            texts = unit_texts(Tokens(example.input_ids, example.loss_weights, example.notes))
            has_answer = Unit.read(example.notes).kinds[0] == Kind.CHOSEN
            if has_answer and len(texts) > 1 and not _same_answer(*texts[:2]):
                return RowProblem(
                    "teacher_prompt_answers",
                    "with the prompt that only the teacher sees, other answer tokens are trained than without it",
                    "--loss_scale last_round trains the last answer alone; see also --max_length",
                )
        return outcome

    def stop_token_ids(self) -> list[int]:
        """Ids that end an answer."""
        return self.units.stop_token_ids()

    def fingerprint(self) -> str:
        """A hash that changes whenever the unit of some row could."""
        return combined({"tokenizer": self.tokenizer_parts(), "settings": self.settings(), "dated": self.dated()})

    def tokenizer_parts(self) -> dict[str, str]:
        """As the chat encoder's."""
        return self.units.tokenizer_parts()

    def settings(self) -> dict[str, Any]:
        """The unit encoder's, and what rows must have."""
        return {**self.units.settings(), "distillation": vars(self.wanted)}

    def dated(self) -> list[list[str]]:
        """As the chat encoder's."""
        return self.units.dated()


def read_system(setting: str | None) -> str | None:
    """`--teacher_prompt`: a text, or the name of a .txt file with it.

    Raises:
        UsageError: the file can't be read.
    """
    if setting is None or "\n" in setting or not setting.endswith(".txt"):
        return setting
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the teacher's prompt can't be read: {error}", where="--teacher_prompt") from error


def _below(system: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All messages up to the last question, under another system prompt."""
    end = max((number for number, message in enumerate(messages, 1) if message["role"] == "user"), default=0)
    rest = [message for message in messages[:end] if message["role"] != "system"]
    return [{"role": "system", "content": system}, *rest]


# --- units to texts ---


@dataclass(frozen=True)
class Lesson:
    """What student and teacher read of a row.

    Attributes:
        student, teacher: the same object where both read the same.
        answered: whether there is an answer: trained tokens, the same in both.
        ref: where the row came from.
    """

    student: Tokens
    teacher: Tokens
    answered: bool
    ref: RowRef

    def with_answer(self, answer: Sequence[int]) -> Lesson:
        """The same prompts with another answer, all of whose tokens are trained; earlier answers are not."""
        student = _answer(self.prompt(self.student), answer)
        same = self.teacher is self.student
        return Lesson(student, student if same else _answer(self.prompt(self.teacher), answer), True, self.ref)

    def prompt(self, text: Tokens) -> np.ndarray:
        """The ids that come before the last answer."""
        if not self.answered:
            return text.ids
        trained = np.flatnonzero(text.weights)
        if not len(trained):
            return text.ids
        return text.ids[: trained[np.flatnonzero(np.diff(trained, prepend=-1) > 1)[-1]]]


def lessons_of(batch: Batch) -> list[Lesson]:
    """The lessons of a micro-batch of units whose prompts are written out."""
    sequences = batch.sequences
    assert sequences is not None and batch.prefixes is None
    texts: list[list[Tokens]] = [[] for _ in sequences.values]
    kinds: list[list[int]] = [[] for _ in sequences.values]
    ids, width = batch.input_ids.flatten().numpy(), batch.input_ids.shape[1]
    for number, (unit, kind) in enumerate(zip(sequences.unit.tolist(), sequences.kind.tolist(), strict=True)):
        if batch.borders is not None:
            start, end = batch.borders[number : number + 2]
        else:
            assert batch.attention_mask is not None
            start = number * width
            end = start + int(batch.attention_mask[number].sum())
        mine = sequences.target == number
        weights = np.zeros(end - start, dtype=np.float32)
        weights[(batch.target_index[mine] - start + 1).numpy()] = batch.target_weights[mine].numpy()
        texts[unit].append(Tokens(ids[start:end].astype(np.int32), weights))
        kinds[unit].append(kind)
    return [
        Lesson(mine[0], mine[min(1, len(mine) - 1)], kind[0] == Kind.CHOSEN, ref)
        for mine, kind, ref in zip(_unmarked(texts, kinds), kinds, batch.refs, strict=True)
    ]


def _unmarked(texts: list[list[Tokens]], kinds: list[list[int]]) -> Iterator[list[Tokens]]:
    """Prompts without an answer carry a weight that only keeps their row."""
    for mine, kind in zip(texts, kinds, strict=True):
        if kind[0] == Kind.CHOSEN:
            yield mine
        else:
            yield [Tokens(text.ids, np.zeros_like(text.weights)) for text in mine]


def student_texts(examples: Examples) -> Iterator[Tokens]:
    """What the student reads of each example, in their order."""
    return (unit_texts(tokens_of(examples, index))[0] for index in range(len(examples)))


def answered(examples: Examples) -> int:
    """How many examples have an answer."""
    return sum(Unit.read(examples.notes(index)).kinds[0] == Kind.CHOSEN for index in range(len(examples)))


def unit_texts(example: Tokens) -> list[Tokens]:
    """The texts of a unit, each a prefix and a part. The first weight is 0: nothing predicts the first token."""
    unit = Unit.read(example.notes)
    head = slice(0, unit.prefix)
    texts = []
    for part in unit.parts():
        weights = np.concatenate([example.weights[head], example.weights[part]])
        texts.append(Tokens(np.concatenate([example.ids[head], example.ids[part]]), weights))
    return texts


class _Trained(NamedTuple):
    """The tokens of a text that are trained, and their weights."""

    ids: np.ndarray
    weights: np.ndarray


def _trained(text: Tokens) -> _Trained:
    places = np.flatnonzero(text.weights)
    return _Trained(text.ids[places], text.weights[places])


def _same_answer(first: Tokens, second: Tokens) -> bool:
    ours, theirs = _trained(first), _trained(second)
    return np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.weights, theirs.weights)


def _answer(prompt: np.ndarray, answer: Sequence[int]) -> Tokens:
    ids = np.concatenate([prompt, np.array(answer, dtype=np.int32)]).astype(np.int32)
    weights = np.zeros(len(ids), dtype=np.float32)
    weights[len(prompt) :] = 1.0
    return Tokens(ids, weights)
