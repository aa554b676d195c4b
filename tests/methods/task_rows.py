"""Rows of contracts for each task, and the settings that train on them."""

from __future__ import annotations

import random
from typing import Any

CLAUSES = {
    "termination": ["The agreement ends after {n} days notice", "Either party may leave on breach within {n} days"],
    "payment": ["The fee of {n} dollars is due monthly", "Invoices are settled within {n} days by bank transfer"],
    "liability": ["Damages are limited to {n} dollars", "The supplier bears no loss above {n}"],
}
PARTIES = ["Acme Corp", "Blue Ltd", "Zenith Bank"]
TASKS: dict[str, dict[str, Any]] = {
    "single": {"task_type": "seq_cls"},
    "weighted": {"task_type": "seq_cls", "class_weights": [0.5, 1.0, 2.0]},
    "several": {"task_type": "seq_cls", "problem_type": "multi_label_classification"},
    "number": {"task_type": "seq_cls", "problem_type": "regression"},
    "mean": {"task_type": "seq_cls", "pooling": "mean"},
    "spans": {"task_type": "token_cls"},
    "words": {"task_type": "token_cls"},
    "infonce": {"task_type": "embedding", "mrl_dims": [16]},
    "infonce_mean": {"task_type": "embedding", "pooling": "mean", "infonce_include_qq": True},
    "infonce_alone": {"task_type": "embedding", "infonce_use_batch": False},
    "cosine": {"task_type": "embedding", "loss_type": "cosine_similarity"},
    "contrastive": {"task_type": "embedding", "loss_type": "contrastive"},
    "online": {"task_type": "embedding", "loss_type": "online_contrastive"},
    "cosent": {"task_type": "embedding", "loss_type": "cosent"},
    "pointwise": {"task_type": "reranker"},
    "listwise": {"task_type": "reranker", "loss_type": "listwise"},
    "rank_mean": {"task_type": "reranker", "pooling": "mean"},
    "words_rank": {"task_type": "generative_reranker"},
    "words_list": {"task_type": "generative_reranker", "loss_type": "listwise"},
}


def _clause(draw: random.Random, kind: str) -> str:
    return draw.choice(CLAUSES[kind]).format(n=draw.randint(2, 99))


def _entities(draw: random.Random) -> dict[str, Any]:
    party, amount = draw.choice(PARTIES), f"{draw.randint(2, 99)} dollars"
    text = f"{party} shall pay {amount} to the seller" + " without delay" * draw.randint(0, 2)
    at = text.index(amount)
    spans = [(0, len(party), "PARTY"), (at, at + len(amount), "AMOUNT")]
    return {"text": text, "spans": [{"start": a, "end": b, "label": label} for a, b, label in spans]}


def _words(draw: random.Random) -> dict[str, Any]:
    row = _entities(draw)
    words, party = row["text"].split(), row["spans"][0]["end"]
    count = len(row["text"][:party].split())
    tags = ["B-PARTY", *["I-PARTY"] * (count - 1), *["O"] * (len(words) - count)]
    return {"tokens": words, "labels": tags}


def _documents(draw: random.Random) -> tuple[str, str, list[str]]:
    kind, other = draw.sample(list(CLAUSES), 2)
    return _clause(draw, kind), _clause(draw, kind), [_clause(draw, other) for _ in range(draw.randint(1, 3))]


def task_row(name: str, draw: random.Random) -> dict[str, Any]:
    """A row that goes with `TASKS[name]`."""
    kinds = list(CLAUSES)
    if name in ("single", "weighted", "mean"):
        kind = draw.choice(kinds)
        return {"text": _clause(draw, kind), "label": kind}
    if name == "several":
        some = draw.sample(kinds, draw.randint(0, 2))
        return {"text": ". ".join(_clause(draw, kind) for kind in some) or "Nothing of note", "label": some}
    if name == "number":
        count = draw.randint(0, 6)
        text = f"the value {draw.randint(0, 10**6)} is" + " good" * count  # no text twice: equal scores make ranks jump
        return {"text": text, "label": count + 0.5}
    if name in ("spans", "words"):
        return _entities(draw) if name == "spans" else _words(draw)
    text, fits, others = _documents(draw)
    if TASKS[name]["task_type"] != "embedding":
        return {"query": text, "positive": [fits], "negative": others}
    if name in ("cosine", "cosent"):
        return {"sentence1": text, "sentence2": fits if draw.random() < 0.5 else others[0], "score": draw.random()}
    return {"anchor": text, "positive": fits, "negatives": others}


def task_rows(name: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """So many rows; the first ones have every class."""
    draw = random.Random(f"{name} {seed}")
    rows = [task_row(name, draw) for _ in range(count)]
    if name in ("single", "weighted", "mean"):
        for row, kind in zip(rows, CLAUSES, strict=False):
            row |= {"text": _clause(draw, kind), "label": kind}
    if name == "several":
        rows[0] |= {"label": list(CLAUSES)}
    return rows
