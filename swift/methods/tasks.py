"""`swift sft --task_type`: classes of texts and tokens, vectors, scores of documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from swift.config.commands import SftConfig, TrainConfig
from swift.config.task import TaskConfig
from swift.core.errors import UsageError
from swift.data.encoding.for_task import ROW_LAYOUTS, task_encoder
from swift.data.encoding.units import Judging, UnitEncoder
from swift.data.labels import LabelSpace
from swift.data.loading.batch import Batch
from swift.distributed.mesh import Axis, Mesh
from swift.methods.classes import label_notes, read_labels
from swift.methods.task_look_ahead import TaskLookAhead
from swift.models.head import OutputHead
from swift.models.kinds import Task, is_encoder, settle_task
from swift.models.loading import load_configuration, resolve_model
from swift.objectives.classification import ClassificationObjective, ClassLoss, TokenClassificationObjective
from swift.objectives.embedding import (
    Contrastive,
    CoSENT,
    CosineSimilarity,
    EmbeddingLoss,
    EmbeddingObjective,
    InfoNCE,
    Matryoshka,
)
from swift.objectives.pooled import MeanPooled
from swift.objectives.predictions import Report
from swift.objectives.ranking import RerankerObjective
from swift.objectives.task_metrics import ClassMetrics, RankMetrics, TaskMetrics, TokenMetrics, VectorMetrics
from swift.training.method import LookAhead, Method, Surroundings
from swift.training.module import Objectives, Probe
from swift.training.session import Session

TaskObjective = (
    ClassificationObjective | TokenClassificationObjective | EmbeddingObjective | RerankerObjective | MeanPooled
)


def task_method(config: SftConfig, command: str) -> Method:
    """The method of a task. Which classes there are is known once the run has begun: `settle` completes it."""
    task = config.task
    coupled = task.task_type == "embedding" and embedding_loss(task).couples
    notes = [_COUPLED] if coupled else []
    return Method(
        command,
        make_encoder=_unsettled,
        make_objectives=_unsettled,
        row_layout=ROW_LAYOUTS[task.task_type],
        batches={"units": True},
        wants_dropout=not coupled,
        settle=_settle,
        notes=tuple(notes),
    )


_COUPLED = (
    "the loss couples the texts of a whole step, which are measured before they are trained on: dropout is off, so "
    "that both passes give the same vectors"
)


def _unsettled(*_: Any) -> Any:
    raise RuntimeError("the method is settled once the run has begun")


@dataclass(frozen=True)
class _Pieces:
    """What a task comes to: the model's kind, how rows are encoded, what is minimised, how it is judged."""

    task: Task
    encoder: Mapping[str, Any]
    metrics: TaskMetrics


@dataclass(frozen=True)
class _Judged:
    """Metrics of evaluations, with the probe that they are made from."""

    probe: Probe
    of: TaskMetrics

    @property
    def means(self) -> bool:
        return not isinstance(self.of, TokenMetrics)

    def report(self, predictions: Any) -> Report:
        return self.of.report(predictions)


def _settle(method: Method, config: TrainConfig, session: Session) -> Method:
    settings = cast(SftConfig, config).task
    kind = settings.task_type
    if config.data.cached_dataset or config.data.cached_val_dataset:
        raise UsageError(
            "token shards hold conversations and texts, not the units of a task",
            where="--cached_dataset",
            fix="give the rows themselves with --dataset",
        )
    if kind in ("seq_cls", "token_cls"):
        found = session.group.from_main(partial(read_labels, config, settings))
        pieces = _classes(settings, found.space)
        session.notes += label_notes(found)
    elif kind == "embedding":
        pieces = _vectors(settings)
    else:
        pieces = _documents(settings)
    task, targets = session.group.from_main(partial(_complete, config, pieces.task))
    pooled = {"pooling": task.pooling} if task.pooling is not None else {}
    words: list[tuple[int, int]] = []  # of a generative reranker: known once there is a tokenizer

    def make_encoder(tokenizer: Any, config: TrainConfig) -> UnitEncoder:
        drawn = {"seed": config.training.seed} if "most" in pieces.encoder else {}
        encoder = task_encoder(tokenizer, config.template, method.row_layout, **pieces.encoder, **pooled, **drawn)
        if encoder.word_ids is not None:
            words[:] = [encoder.word_ids]
        return encoder

    def make_objective(axis: Axis | None) -> TaskObjective:
        return task_objective(settings, task, axis, words[0] if words else None)

    def make_objectives(config: TrainConfig, mesh: Mesh) -> Objectives:
        objective = make_objective(mesh["cp"] or None)
        return Objectives(objective, objective.evaluation())

    def make_look_ahead(around: Surroundings) -> LookAhead:
        mesh = around.session.mesh
        return TaskLookAhead(around.session.group.along(mesh["dp"]), make_objective(None))

    def probe(hidden: torch.Tensor, head: OutputHead, batch: Batch) -> torch.Tensor:
        return make_objective(session.mesh["cp"] or None).probe(hidden, head, batch)

    return replace(
        method,
        task=task,
        batches={**method.batches, "targets": targets},
        make_encoder=make_encoder,
        make_objectives=make_objectives,
        make_look_ahead=make_look_ahead,
        metrics=_Judged(probe, pieces.metrics),
    )


def _complete(config: TrainConfig, task: Task) -> tuple[Task, str]:
    """The task with what the model says of it, and whose state each target is given (`Layout.targets`)."""
    if task.kind == "causal_lm":
        return task, "next"
    folder = resolve_model(config.model)
    described = load_configuration(folder, config.model)
    task = settle_task(described, task, folder)
    if task.pooling == "cls" and not is_encoder(described):
        raise UsageError(
            "the first token of a text sees none of the others in this model, so it can't stand for the text",
            where="--pooling cls",
            fix="--pooling last, or mean",
        )
    return task, "last" if task.pooling == "last" else "each"


def _classes(settings: TaskConfig, space: LabelSpace) -> _Pieces:
    names = space.names or tuple(str(number) for number in range(space.num_labels))
    whole = settings.task_type == "seq_cls"
    if settings.class_weights and len(settings.class_weights) != space.num_labels:
        raise UsageError(
            f"{len(settings.class_weights)} class weights for {space.num_labels} classes",
            where="--class_weights",
            fix="one for each, in the order of the classes: " + ", ".join(names[:12]),
        )
    task = Task(
        "seq_cls" if whole else "token_cls",
        num_labels=space.num_labels,
        problem_type=space.problem if whole else None,
        labels=space.names,
        pooling=settings.pooling if whole else None,
        extra={"task_type": settings.task_type},
    )
    metrics: TaskMetrics = ClassMetrics(space.problem, names) if whole else TokenMetrics(names)
    return _Pieces(task, {"labels": space}, metrics)


def _vectors(settings: TaskConfig) -> _Pieces:
    loss = embedding_loss(settings)
    extra: dict[str, Any] = {"task_type": "embedding", "mrl_dims": list(settings.mrl_dims)}
    encoder = {
        "most": (settings.max_positive_samples, settings.max_negative_samples),
        "need_negatives": isinstance(loss, InfoNCE) and not loss.use_batch,
    }
    task = Task("embedding", pooling=settings.pooling, extra=extra)
    return _Pieces(task, encoder, VectorMetrics(tuple(settings.mrl_dims)))


def _documents(settings: TaskConfig) -> _Pieces:
    encoder: dict[str, Any] = {
        "most": (settings.max_positive_samples, settings.max_negative_samples),
        "need_negatives": settings.loss_type == "listwise",
    }
    extra: dict[str, Any] = {"task_type": settings.task_type}
    if settings.task_type == "generative_reranker":
        encoder["judging"] = Judging(settings.positive_word, settings.negative_word)
        extra |= {"positive_word": settings.positive_word, "negative_word": settings.negative_word}
        task = Task("causal_lm", extra=extra)
    else:
        task = Task("seq_cls", num_labels=1, problem_type="regression", pooling=settings.pooling, extra=extra)
    return _Pieces(task, encoder, RankMetrics())


def task_objective(
    settings: TaskConfig, task: Task, axis: Axis | None, words: tuple[int, int] | None = None
) -> TaskObjective:
    """What a task minimises.

    Args:
        task: settled, with the classes.
        axis: ranks that share a row (`cp`).
        words: the tokens that a generative reranker compares.
    """
    loss = ClassLoss(class_weights=tuple(settings.class_weights))
    if settings.task_type == "token_cls":
        return TokenClassificationObjective(loss)
    if settings.task_type == "embedding":
        return EmbeddingObjective(
            embedding_loss(settings), cast(Any, task.pooling), Matryoshka(tuple(settings.mrl_dims)), axis=axis
        )
    mean = task.pooling == "mean"
    inner: ClassificationObjective | RerankerObjective
    if settings.task_type == "seq_cls":
        inner = ClassificationObjective(cast(Any, task.problem_type), loss)
    else:
        inner = RerankerObjective(
            "listwise" if settings.loss_type == "listwise" else "pointwise", words=words, axis=None if mean else axis
        )
    return MeanPooled(inner, axis) if mean else inner


def embedding_loss(settings: TaskConfig) -> EmbeddingLoss:
    """The loss between vectors that the settings name."""
    match settings.loss_type:
        case "cosine_similarity":
            return CosineSimilarity()
        case "contrastive":
            return Contrastive()
        case "online_contrastive":
            return Contrastive(hard_only=True)
        case "cosent":
            return CoSENT()
        case _:
            return InfoNCE(
                settings.infonce_temperature,
                use_batch=settings.infonce_use_batch,
                hard_negatives=settings.infonce_hard_negatives,
                mask_false_negatives=settings.infonce_mask_fake_negative,
                margin=settings.infonce_fake_neg_margin,
                include_qq=settings.infonce_include_qq,
                include_dd=settings.infonce_include_dd,
            )
