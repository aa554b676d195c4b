"""What a teacher says of texts: the trained model without what it has learnt, or a server.

A teacher is asked before a step's first gradient and tells, of every target, its hidden states, its best tokens or its
log-probability of the target, in the form that `swift.objectives.distill` takes. A model of its own is in
`teacher_model`, one that was asked long ago in `teacher_store`. Knows nothing of steps or losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

from swift.core.errors import SwiftError
from swift.data.loading.batch import Batch, Layout, Tokens, make_batch
from swift.methods.distill_rows import Lesson
from swift.methods.endpoint import TeacherEndpoint
from swift.methods.probes import best_tokens, scaled_logprobs, states
from swift.methods.reference import adapters_off
from swift.methods.rollouts import Writing, write_anew, write_cached
from swift.methods.topk_store import BestTokens, at_temperature
from swift.models.head import OutputHead
from swift.training.module import Probe
from swift.training.session import Session
from swift.training.strategy import Strategy

T = TypeVar("T")
Facts = dict[str, torch.Tensor]


class Form(NamedTuple):
    """What is asked of a teacher.

    Attributes:
        k: its best tokens; 0 asks for everything.
        vocab_size: ids that both tokenizers have; temperature: of the loss.
        tail: whether the rest of the vocabulary is compared too.
    """

    k: int = 0
    vocab_size: int = 0
    temperature: float = 1.0
    tail: bool = True


class Teacher(Protocol):
    """Says what a batch's targets look like to a teacher.

    Attributes:
        head: of its hidden states, where it tells these and the head isn't the student's.
    """

    head: OutputHead | None

    def tell(self, strategy: Strategy, lessons: Sequence[Lesson]) -> Facts:
        """What it knows of each target, in the form that was asked for; the same on all ranks that share the batch.

        Args:
            strategy: the student's; all ranks call it with as many batches.
        """
        ...


class PresentTeacher(Teacher, Protocol):
    """A teacher that runs here, and so can be asked about single tokens and write answers."""

    def likelihood(self, strategy: Strategy, lessons: Sequence[Lesson]) -> torch.Tensor:
        """The log-probability of each target, [targets]."""
        ...

    def write(
        self, strategy: Strategy, prompts: Sequence[Sequence[int]], seeds: Sequence[str], writing: Writing
    ) -> list[list[int]]:
        """Its answer to each prompt."""
        ...


def facts_of(found: torch.Tensor, form: Form) -> Facts:
    """What a probe measured, as facts, in the computer's memory until its batch's turn."""
    found = found.cpu()
    if not form.k:
        return {"teacher_hidden": found}
    ids, logps = found.chunk(2, 1)
    return {"teacher_topk_ids": ids.long(), "teacher_topk_logps": logps}


def probe_of(form: Form) -> Probe:
    """What measures a present teacher."""
    return best_tokens(form.k, form.vocab_size, form.temperature) if form.k else states


def texts_batch(texts: Sequence[Tokens], layout: Layout) -> Batch:
    """Texts as a micro-batch of plain examples."""
    return make_batch(texts, [], replace(layout, units=False, targets="next", companions=False))


# --- the trained model ---


@dataclass
class SelfTeacher:
    """The trained model, with its adapter off if it has one, and with the prompt that only the teacher sees.

    Args:
        wholes: this process's pieces of the model, if their adapters are to be off; else nothing.
        layout: how the student takes examples.
        whole: all of the model, where this process has it; else None.
    """

    wholes: list[nn.Module]
    layout: Layout
    form: Form
    session: Session
    whole: nn.Module | None = None
    head: OutputHead | None = field(default=None, init=False)

    def tell(self, strategy: Strategy, lessons: Sequence[Lesson]) -> Facts:
        return facts_of(self._measure(strategy, lessons, probe_of(self.form)), self.form)

    def likelihood(self, strategy: Strategy, lessons: Sequence[Lesson]) -> torch.Tensor:
        return self._measure(strategy, lessons, scaled_logprobs(self.form.vocab_size, self.form.temperature)).cpu()

    def _measure(self, strategy: Strategy, lessons: Sequence[Lesson], probe: Probe) -> torch.Tensor:
        with self._untaught():
            return strategy.measure(texts_batch([lesson.teacher for lesson in lessons], self.layout), probe)

    def _untaught(self) -> AbstractContextManager[None]:
        return adapters_off(self.wholes) if self.wholes else nullcontext()

    def write(
        self, strategy: Strategy, prompts: Sequence[Sequence[int]], seeds: Sequence[str], writing: Writing
    ) -> list[list[int]]:
        with self._untaught():
            if self.whole is not None:
                return write_cached(self.whole, prompts, seeds, writing, self.session.precision.autocast)
            return write_anew(strategy, prompts, seeds, writing, (self.layout, self.session.group))


# --- a server ---


@dataclass
class ServerTeacher:
    """A teacher behind an endpoint, asked by one process for all that share its rows."""

    endpoint: TeacherEndpoint
    form: Form
    session: Session
    head: OutputHead | None = field(default=None, init=False)

    def tell(self, strategy: Strategy, lessons: Sequence[Lesson]) -> Facts:
        return best_facts(once_for_all(self.session, lambda: self._ask(lessons)), self.form, stored=1.0)

    def _ask(self, lessons: Sequence[Lesson]) -> list[BestTokens]:
        asked = [lesson.teacher for lesson in lessons if lesson.teacher.weights.any()]
        found = self.endpoint.best_tokens([text.ids.tolist() for text in asked])
        rows = [np.flatnonzero(text.weights[1:]) for text in asked]
        return [BestTokens(best.ids[r], best.logps[r]) for best, r in zip(found, rows, strict=True)]


def best_facts(found: Sequence[BestTokens], form: Form, *, stored: float) -> Facts:
    """Best tokens of several texts, end to end, as facts.

    Args:
        stored: the temperature at which they were taken.

    Raises:
        DataError: they can't be taken to the temperature of the loss.
    """
    ids = np.concatenate([np.zeros((0, form.k), np.int64), *(best.ids[:, : form.k] for best in found)])
    logps = np.concatenate([np.zeros((0, form.k), np.float32), *(best.logps[:, : form.k] for best in found)])
    logps = at_temperature(logps, stored, form.temperature, tail=form.tail)
    return {"teacher_topk_ids": torch.from_numpy(ids), "teacher_topk_logps": torch.from_numpy(logps).float()}


def once_for_all(session: Session, ask: Callable[[], T]) -> T:
    """Ask in one of the processes that hold the same rows, and tell the others, its error too. All call it at once."""
    mesh = session.mesh
    if not (mesh["tp"] or mesh["pp"] or mesh["cp"]):
        return ask()
    outcome: tuple[bool, T | SwiftError] | None = None
    if not (mesh["tp"].rank or mesh["pp"].rank or mesh["cp"].rank):
        try:
            outcome = True, ask()
        except SwiftError as error:
            outcome = False, error
    told = session.group.gather((mesh["dp"].rank, outcome))
    good, value = next(found for rank, found in told if rank == mesh["dp"].rank and found is not None)
    if isinstance(value, SwiftError) and not good:
        raise value
    return value  # type: ignore[return-value]
