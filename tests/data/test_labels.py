"""Reading the labels of a data set: which there are, their numbers, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swift.config.data import RowsConfig
from swift.core.errors import DataError
from swift.data.labels import LabelCounts, LabelSpace, collect_labels


@pytest.fixture
def collect(write_rows: Callable, tmp_path: Path) -> Callable[..., LabelCounts]:
    def run(rows: list[dict[str, Any]], **more: Any) -> LabelCounts:
        return collect_labels([str(write_rows(tmp_path / "rows.jsonl", rows))], RowsConfig(), **more)

    return run


def texts(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": "x", "label": label} for label in labels]


@pytest.mark.parametrize(
    ("labels", "settings", "space"),
    [
        (["b", "a", "b"], {}, LabelSpace("single_label_classification", 2, ("a", "b"))),
        (["b", "a"], {"label_names": ["b", "a", "c"]}, LabelSpace("single_label_classification", 3, ("b", "a", "c"))),
        ([0, 2], {}, LabelSpace("single_label_classification", 3)),
        (["0", "2"], {}, LabelSpace("single_label_classification", 3)),
        ([0, 1], {"num_labels": 5}, LabelSpace("single_label_classification", 5)),
        ([True, False], {}, LabelSpace("single_label_classification", 2)),
        ([[0, 3], [1], []], {}, LabelSpace("multi_label_classification", 4)),
        ([["x"], ["y", "x"]], {}, LabelSpace("multi_label_classification", 2, ("x", "y"))),
        ([0.5, 1], {}, LabelSpace("regression", 1)),
        ([1, 5], {"problem": "regression"}, LabelSpace("regression", 1)),
        ([[0.5, 1.0], [0.1, 2.0]], {}, LabelSpace("regression", 2)),
    ],
)
def test_the_labels_of_rows(collect: Callable, labels: list, settings: dict, space: LabelSpace) -> None:
    found = collect(texts(*labels), **settings)
    assert found.space == space and found.rows == len(labels) and not found.out_of_range


def test_counts_bad_rows_and_labels_out_of_range(collect: Callable, tmp_path: Path) -> None:
    found = collect([*texts(0, 1, 1, 4), {"text": "x"}], num_labels=2)
    assert found.counts == {0: 1, 1: 2, 4: 1} and found.bad == 1
    assert found.out_of_range == {4: f"{tmp_path / 'rows.jsonl'}:4"}
    assert not found.all_same
    assert collect(texts("a", "a")).all_same and not collect(texts("a")).all_same


def test_words_and_spans(collect: Callable) -> None:
    found = collect([{"tokens": ["a", "b"], "tags": ["O", "B-X"]}], layout="tokens")
    assert found.space.names == ("O", "B-X") and found.counts == {"O": 1, "B-X": 1}
    rows = [{"text": "abc", "spans": [[0, 1, "X"]]}]
    assert collect(rows, layout="tokens").space.names == ("O", "B-X", "I-X")
    assert collect(rows, layout="tokens", bio=False).space.names == ("O", "X")


def test_what_cannot_be_labels(collect: Callable, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="some labels are names"):
        collect(texts("a", 1))
    with pytest.raises(DataError, match=r"0\.5 is no class"):
        collect(texts(0.5), problem="single_label_classification")
    with pytest.raises(DataError, match="no row has a label"):
        collect([{"text": "x"}])
