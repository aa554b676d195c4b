"""What a model is tuned for beside conversation: classes of texts or tokens, vectors, scores of documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swift.config.fields import setting

TaskName = Literal["causal_lm", "seq_cls", "token_cls", "embedding", "reranker", "generative_reranker"]
TaskLoss = Literal[
    "cross_entropy",
    "infonce",
    "cosine_similarity",
    "contrastive",
    "online_contrastive",
    "cosent",
    "pointwise",
    "listwise",
]


@dataclass
class ServedTaskConfig:
    """Task"""

    task_type: TaskName = setting(
        "causal_lm",
        help="conversation and text, classes of texts (seq_cls) or tokens (token_cls), vectors, or scores of documents "
        "for a query from a head of its own (reranker) or from two words (generative_reranker)",
    )
    pooling: Literal["last", "mean", "cls"] | None = setting(
        None,
        help="state that stands for a text: of its last token, the mean of all, or of its first token; default: the "
        "model's own way, which is last for decoders",
    )
    positive_word: str = setting("yes", help="generative_reranker: word for a document that fits")
    negative_word: str = setting("no", help="generative_reranker: word for one that doesn't")


@dataclass
class TaskConfig(ServedTaskConfig):
    """Task"""

    loss_type: TaskLoss | None = setting(
        None, help="default: infonce for embedding, pointwise for rerankers, else the one that the task has"
    )
    problem_type: Literal["single_label_classification", "multi_label_classification", "regression"] | None = setting(
        None, help="seq_cls; default: from the rows: one class, a list of them, or a number with a fraction"
    )
    num_labels: int | None = setting(None, help="classes, or numbers per text in regression; default: from the rows")
    label_names: list[str] = setting(help="names of the classes, in the order of their numbers", factory=list)
    class_weights: list[float] = setting(help="weight of each class in the loss; default: 1 each", factory=list)
    infonce_temperature: float = setting(0.1, help="infonce: divides the similarities")
    infonce_use_batch: bool = setting(True, help="infonce: the other units of the step give negatives as well")
    infonce_hard_negatives: int | None = setting(
        None, help="infonce: negatives of a row: its first so many, or repeated to so many; default: all that it has"
    )
    infonce_mask_fake_negative: bool = setting(
        False, help="infonce: leave out negatives more similar than the positive plus infonce_fake_neg_margin"
    )
    infonce_fake_neg_margin: float = setting(0.1, help="infonce: see infonce_mask_fake_negative")
    infonce_include_qq: bool = setting(False, help="infonce: other anchors are negatives of an anchor as well")
    infonce_include_dd: bool = setting(False, help="infonce: other documents are negatives of the positive as well")
    max_positive_samples: int = setting(1, help="positives of a row that are used at most, drawn with the seed")
    max_negative_samples: int = setting(7, help="negatives of a row that are used at most, drawn with the seed")
    mrl_dims: list[int] = setting(
        help="Matryoshka: train the first so many numbers of a vector as vectors of their own", factory=list
    )


@dataclass
class AnsweredTaskConfig(ServedTaskConfig):
    """Task"""

    mrl_dim: int | None = setting(None, help="embedding: keep the first so many numbers of a vector; default: all")
    reranker_use_activation: bool = setting(True, help="scores of rerankers from 0 to 1 (sigmoid); false: as they are")
