"""Which task a model in a folder has a head for, and how its rows are asked about.

What training wrote beside the checkpoint (`task.json`, the settings of the run) decides; a classifier of another tool
is known by the class in its config.json, and an embedding model by `--task_type embedding`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from swift.config import InferConfig, load_config
from swift.config.commands import RlhfConfig, SftConfig
from swift.config.data import TemplateConfig
from swift.config.saved import find_saved
from swift.core.errors import UsageError
from swift.data.columns import Layout as RowLayout
from swift.data.encoding.for_task import ROW_LAYOUTS, task_encoder
from swift.data.encoding.units import Judging, UnitEncoder
from swift.data.labels import LabelSpace
from swift.inference.score_words import (
    Answerer,
    ClassAnswers,
    RankAnswers,
    RewardAnswers,
    TokenAnswers,
    VectorAnswers,
)
from swift.inference.scoring import Probe
from swift.models.kinds import Task, read_task, settle_task, stored_kind
from swift.models.loading import load_configuration
from swift.objectives.classification import ClassificationObjective
from swift.objectives.embedding import CosineSimilarity, EmbeddingObjective
from swift.objectives.pooled import MeanPooled
from swift.objectives.ranking import RerankerObjective

_UNCUT = 1 << 24


@dataclass(frozen=True)
class Judge:
    """All of a scorer but the model.

    Attributes:
        task: which head the model has. name: of the task, as `--task_type` has it; also `reward`.
        row_layout: what rows are read as.
        encoder: of texts, for notices and fingerprints.
    """

    task: Task
    name: str
    row_layout: RowLayout
    encoder: UnitEncoder
    answerer: Answerer
    probe: Probe
    targets: Literal["next", "last", "each"]


def served_task(config: InferConfig, base: Path, adapter: Path | None) -> tuple[Task, str] | None:
    """The task of a checkpoint and its name; None for a model that answers with text.

    Raises:
        UsageError: it has a head for another task than the one asked for, or none.
    """
    wanted = config.task.task_type
    task = read_task(adapter) if adapter is not None else None
    task = task or read_task(base)
    described = load_configuration(base, config.model)
    if task is None and (kind := stored_kind(described)) in ("seq_cls", "token_cls"):
        assert kind is not None
        task = Task(kind, pooling=config.task.pooling)
    if task is None and wanted == "embedding":
        task = Task("embedding", pooling=config.task.pooling)
    if task is None and wanted == "generative_reranker":
        words = {"positive_word": config.task.positive_word, "negative_word": config.task.negative_word}
        task = Task("causal_lm", extra={"task_type": wanted, **words})
    if task is None and wanted == "causal_lm":
        return None
    if task is None:
        raise UsageError(
            f"the model has no head for {wanted}",
            where=str(adapter or base),
            fix="train one with swift sft, and give its checkpoint",
        )
    name = task.extra.get("task_type") or ("reranker" if wanted == "reranker" else task.kind)
    if wanted not in ("causal_lm", name):
        raise UsageError(
            f"the model was trained for {name}, and {wanted} is asked for",
            where="--task_type",
            fix="leave it out",
        )
    return settle_task(described, task, base), str(name)


def make_judge(config: InferConfig, task: Task, name: str, tokenizer: Any, folder: Path) -> Judge:
    """How rows of a task are asked about.

    Args:
        folder: the checkpoint, whose run's settings say where texts were cut.
    """
    template = _template(config, name, folder)
    pooling: Any = task.pooling or "last"
    targets: Literal["next", "last", "each"] = "last" if pooling == "last" else "each"
    layout = ROW_LAYOUTS[name]
    answerer: Answerer
    probe: Probe
    if name == "reward":
        pairs = task_encoder(tokenizer, template, "pairs")
        single = task_encoder(tokenizer, template, "binary")
        reward = ClassificationObjective("regression")
        return Judge(task, name, layout, pairs, RewardAnswers(single, pairs), reward.probe, "last")
    if name in ("seq_cls", "token_cls"):
        problem: Any = task.problem_type or _guessed_problem(task)
        space = LabelSpace(problem, task.num_labels or len(task.labels), task.labels)
        if name == "token_cls":
            encoder = task_encoder(tokenizer, template, layout, labels=space)
            whole = ClassificationObjective()  # whose probe gives the logits of any state
            return Judge(task, name, layout, encoder, TokenAnswers(encoder, space), whole.probe, "each")
        encoder = task_encoder(tokenizer, template, layout, labels=space, pooling=pooling)
        inner = ClassificationObjective(problem)
        answerer = ClassAnswers(encoder, space)
        probe = MeanPooled(inner).probe if pooling == "mean" else inner.probe
    elif name == "embedding":
        encoder = task_encoder(tokenizer, template, layout, pooling=pooling)
        answerer, probe = VectorAnswers(encoder, config.task.mrl_dim), EmbeddingObjective(CosineSimilarity()).probe
    else:
        judging = None
        if name == "generative_reranker":
            judging = Judging(task.extra["positive_word"], task.extra["negative_word"])
            pooling, targets = "last", "next"
        encoder = task_encoder(tokenizer, template, layout, judging=judging, pooling=pooling)
        ranker = RerankerObjective(words=encoder.word_ids)
        answerer = RankAnswers(encoder, config.task.reranker_use_activation)
        probe = MeanPooled(ranker).probe if pooling == "mean" else ranker.probe
    return Judge(task, name, layout, encoder, answerer, probe, targets)


def _guessed_problem(task: Task) -> str:
    """As transformers guesses it."""
    return "regression" if task.num_labels == 1 else "single_label_classification"


def _template(config: InferConfig, name: str, folder: Path) -> TemplateConfig:
    """How texts become tokens: cut where the run cut them; those that it left out are cut too, and answered."""
    trained = TemplateConfig(max_length=_UNCUT)
    if find_saved(folder):
        trained = load_config(RlhfConfig if name == "reward" else SftConfig, folder).template
    strategy = trained.truncation_strategy
    if name in ("reward", "generative_reranker"):  # whose ends are read
        strategy = "left"
    elif strategy not in ("left", "right"):
        strategy = "right"
    scale: Any = "last_round" if name == "reward" else trained.loss_scale
    return replace(trained, **vars(config.template), truncation_strategy=strategy, loss_scale=scale)
