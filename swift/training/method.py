"""What differs between ways of tuning: how rows become examples, what the model has on top, what is minimised.

A run is built the same way whatever it trains for; a `Method` is asked at the few places where it matters. The ways
themselves are composed in `swift.methods`; plain next-token prediction, the method of `sft` and `pt`, is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from swift.config.commands import TrainConfig
from swift.core.errors import UsageError
from swift.data.columns import Layout as RowLayout
from swift.data.encoding.encode import ChatEncoder
from swift.data.loading.batch import Batch, Layout
from swift.data.pipeline import TemplateEncoder
from swift.distributed.mesh import Mesh
from swift.models.head import OutputHead
from swift.models.kinds import CAUSAL_LM, Task
from swift.objectives.predictions import Prediction, Report
from swift.training.module import Objectives, next_token
from swift.training.strategy import Strategy
from swift.training.trainer_parts import Callback, RankState

if TYPE_CHECKING:
    from swift.training.data import Data
    from swift.training.model import Model
    from swift.training.session import Session


class LookAhead(Protocol):
    """Works out what the objective has to know of a whole step before the step's first gradient.

    It fills `facts` of the batches and of their sequences, and the sequences' `step`. All ranks call it at once.

    Attributes:
        coupled: whether micro-batches of a step depend on each other; an evaluation is one step then.
        callbacks: of the trainer, that go with it; rank_states: what it remembers, for checkpoints.
    """

    coupled: bool
    callbacks: list[Callback]
    rank_states: dict[str, RankState]

    def __call__(self, strategy: Strategy, batches: list[Batch], *, training: bool) -> None: ...


class Metrics(Protocol):
    """Metrics of an evaluation that are no means over units: F1, AUC, rank correlations.

    Attributes:
        means: whether of each sequence the mean of what the probe gives is wanted.
    """

    @property
    def means(self) -> bool: ...

    def probe(self, hidden: torch.Tensor, head: OutputHead, batch: Batch) -> torch.Tensor: ...

    def report(self, predictions: Sequence[Prediction]) -> Report: ...


@dataclass(frozen=True)
class Surroundings:
    """What a look-ahead is made of."""

    config: TrainConfig
    session: Session
    data: Data
    model: Model


@dataclass(frozen=True)
class Method:
    """A way of tuning.

    Attributes:
        command: the command's name, for messages.
        task: which head the model has, and what goes with it into checkpoints.
        row_layout: what rows must have (`RowOptions.layout`).
        make_encoder: tokenizer and settings -> what turns rows into examples.
        make_objectives: settings and mesh -> what is minimised and measured.
        batches: the fields of a `Layout` that the method decides.
        metrics: of evaluations, beside what the objective sums up.
        wants_dropout: whether the model's dropout stays on in training.
        share_prompts: `auto`, `true` or `false`.
        make_look_ahead: makes what works ahead of each step, once the model is built.
        settle: completes the method by what the rows say, such as which classes there are; every rank calls it.
        before_model: what is done with the data before the model is built.
        notes: what was decided on the user's behalf.
    """

    command: str
    make_encoder: Callable[[Any, TrainConfig], TemplateEncoder]
    make_objectives: Callable[[TrainConfig, Mesh], Objectives]
    task: Task = CAUSAL_LM
    row_layout: RowLayout = "chat"
    batches: Mapping[str, Any] = field(default_factory=dict)
    metrics: Metrics | None = None
    wants_dropout: bool = True
    share_prompts: str = "auto"
    make_look_ahead: Callable[[Surroundings], LookAhead] | None = None
    settle: Callable[[Method, TrainConfig, Session], Method] | None = None
    before_model: Callable[[TrainConfig, Session, Data], None] | None = None
    notes: tuple[str, ...] = ()

    @property
    def units(self) -> bool:
        """Whether examples are units of several sequences."""
        return bool(self.batches.get("units"))

    def arrange(self, layout: Layout, *, why_unshared: str | None) -> Layout:
        """The layout with what the method decides of it.

        Args:
            why_unshared: why sequences can't share the prompt of their unit; None where they can.

        Raises:
            UsageError: sharing was asked for, and can't be.
        """
        if not self.units:
            return replace(layout, **self.batches)
        if self.share_prompts == "true" and why_unshared is not None:
            raise UsageError(
                f"a prompt can't be computed once for all of its answers: {why_unshared}",
                where="--share_prompts true",
                fix="--share_prompts auto",
            )
        share = self.share_prompts != "false" and why_unshared is None
        return replace(layout, **self.batches, share_prefix=share)


def next_token_method(command: str) -> Method:
    """Next-token prediction on conversations or texts."""
    return Method(
        command,
        make_encoder=lambda tokenizer, config: ChatEncoder(tokenizer, config.template),
        make_objectives=lambda config, mesh: next_token(config.objective)(mesh),
    )
