"""From dataset arguments to examples: nothing lost, nothing twice, the same for any number of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from swift.config.data import DataConfig, TemplateConfig
from swift.core.errors import DataError, SwiftError, UsageError
from swift.data.dataset import Prepared, data_fingerprint, iter_rows, load_prepared, prepare_datasets
from swift.data.encoding.encode import ChatEncoder
from swift.data.ledger import Ledger
from swift.data.rows import Row, RowProblem, RowRef
from swift.data.token_files.store import TokenDataset

Write = Callable[..., Path]
Rows = Callable[[int], list[dict[str, Any]]]
LONG = {"query": "long " * 400, "response": "yes"}
BAD = {"messages": [{"role": "user", "content": None}]}


@pytest.fixture
def prepare(tokenizer: Any, tmp_path: Path) -> Callable[..., Prepared]:
    """`prepare(dataset…, template={…}, seed=…, **data settings)`."""

    def run(*dataset: Path | str, template: dict | None = None, seed: int = 42, **settings: Any) -> Prepared:
        progress = settings.pop("progress", None)
        config = TemplateConfig(**{"max_length": 256, **(template or {})})
        data = DataConfig(dataset=[str(item) for item in dataset], **settings)
        encoder = ChatEncoder(tokenizer, config)
        return prepare_datasets(data, config, encoder, seed=seed, run_dir=tmp_path / "run", progress=progress)

    return run


def events(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "run" / "ledger.jsonl").read_text().splitlines()]
    assert lines[-1]["event"] == "summary"
    return lines[:-1], lines[-1]


def lines(dataset: TokenDataset) -> list[int]:
    return [dataset.ref(i).line for i in range(len(dataset))]


def texts(dataset: TokenDataset, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(dataset.tokens(i)[0]) for i in range(len(dataset))]


def test_rows_come_in_file_order_with_their_places(
    prepare: Callable[..., Prepared], tokenizer: Any, chat_rows: Rows, write_rows: Write, tmp_path: Path
) -> None:
    first = write_rows(tmp_path / "a.jsonl", chat_rows(5))
    second = write_rows(tmp_path / "b.jsonl", chat_rows(3))
    train = prepare(first, second).train
    assert [str(train.ref(i)) for i in range(8)] == [f"{first}:{i}" for i in range(1, 6)] + [
        f"{second}:{i}" for i in range(1, 4)
    ]
    expected = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in chat_rows(5) + chat_rows(3)]
    assert texts(train, tokenizer) == expected
    ids, weights = train.tokens(0)
    assert (ids.dtype, weights.dtype) == (np.int32, np.float32)
    assert weights[0] == 0 and 0 < weights.sum() < len(ids)
    assert train.num_tokens == sum(len(train.tokens(i)[0]) for i in range(8))
    assert train.trained_tokens() == sum(int((train.tokens(i)[1] > 0).sum()) for i in range(8))


@pytest.mark.parametrize("strategy", ["delete", "right", "left"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_counts_add_up_for_random_mixtures(
    prepare: Callable[..., Prepared], chat_rows: Rows, tmp_path: Path, strategy: str, seed: int
) -> None:
    """read = kept + dropped = lines that aren't blank, and the file tells of each row that isn't whole."""
    rng = np.random.default_rng(seed)
    good = chat_rows(60)
    kinds = rng.choice(["good", "long", "bad", "broken", "blank"], 60, p=[0.6, 0.1, 0.1, 0.1, 0.1]).tolist()
    written = {"long": json.dumps(LONG), "bad": json.dumps(BAD), "broken": '{"messages": [', "blank": " \r"}
    text = "\n".join(written.get(kind) or json.dumps(good[i]) for i, kind in enumerate(kinds))
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    prepared = prepare(path, template={"truncation_strategy": strategy}, strict=False, max_bad_rows=100)
    count = Counter(kinds)
    tally = prepared.ledger.sources[0]
    assert tally.read == tally.kept + sum(tally.dropped.values()) == 60 - count["blank"]
    assert tally.blank == count["blank"]
    assert tally.dropped["not_json"] == count["broken"]
    assert tally.dropped["no_content"] == count["bad"]
    found, summary = events(tmp_path)
    assert summary["sources"][0]["read"] == tally.read
    dropped = {item["line"] for item in found if item["event"] == "dropped"}
    truncated = {item["line"] for item in found if item["event"] == "truncated"}
    lost = {"bad", "broken"} | ({"long"} if strategy != "left" else set())  # right cuts the whole answer off
    assert dropped == {i for i, kind in enumerate(kinds, 1) if kind in lost}
    assert truncated == {i for i, kind in enumerate(kinds, 1) if kind == "long" and strategy == "left"}
    assert lines(prepared.train) == [i for i, kind in enumerate(kinds, 1) if kind not in lost | {"blank"}]
    assert tally.truncated == len(truncated)
    assert max(prepared.train.lengths) <= 256


def test_strict_stops_at_the_first_bad_row_with_its_place(
    prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path
) -> None:
    rows = chat_rows(10)
    rows[4] = {"messages": [{"role": "user", "content": "x"}, {"role": "asistant", "content": "y"}]}
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError) as caught:
        prepare(path)
    assert caught.value.where == f"{path}:5"
    assert "message 2 has the role 'asistant'" in caught.value.message
    assert "did you mean assistant?" in (caught.value.fix or "")
    assert "--strict false" in (caught.value.fix or "")
    found, summary = events(tmp_path)  # the ledger is written all the same
    assert found[-1]["line"] == 5 and summary["sources"][0]["kept"] == 4


@pytest.mark.parametrize(
    ("allowed", "stops"), [(0.01, True), (0.3, False), (0.2, False), (0.19, True), (2, False), (1, True)]
)
def test_too_many_bad_rows_stop_even_when_not_strict(
    prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path, allowed: float, stops: bool
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [*chat_rows(4), BAD, *chat_rows(4), BAD])
    if not stops:
        prepared = prepare(path, strict=False, max_bad_rows=allowed)
        assert prepared.ledger.bad == 2 and len(prepared.train) == 8
        return
    with pytest.raises(DataError) as caught:
        prepare(path, strict=False, max_bad_rows=allowed)
    assert "rows are bad" in caught.value.message
    assert f"no_content: 2, first at {path}:5" in caught.value.message
    assert "--max_bad_rows" in (caught.value.fix or "")


def test_rows_over_max_length_are_counted_and_are_not_bad(
    prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [LONG, *chat_rows(2), LONG])
    prepared = prepare(path)
    assert prepared.ledger.sources[0].dropped == {"too_long": 2}
    assert prepared.ledger.bad == 0
    assert "dropped 2 too_long" in prepared.ledger.render()


def test_truncation_strategy_raise_stops(
    prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [*chat_rows(2), LONG])
    with pytest.raises(DataError, match="max_length") as caught:
        prepare(path, template={"truncation_strategy": "raise"}, strict=False)
    assert caught.value.where == f"{path}:3"


def test_split_cuts_plain_text_into_pieces_that_lose_nothing(
    prepare: Callable[..., Prepared], tokenizer: Any, write_rows: Write, tmp_path: Path
) -> None:
    text = " ".join(f"word{i}" for i in range(300))
    path = write_rows(tmp_path / "a.jsonl", [{"text": text}, {"text": "short"}])
    template = {"truncation_strategy": "split", "use_chat_template": False, "loss_scale": "all", "max_length": 100}
    prepared = prepare(path, template=template, split_dataset_ratio=0.5, seed=3)
    tally = prepared.ledger.sources[0]
    assert (tally.read, tally.kept, tally.cut_up) == (2, 2, 1)
    assert prepared.val is not None
    pieces = max((prepared.train, prepared.val), key=len)  # the pieces of a row stay on one side
    assert len(pieces) == tally.examples - 1 and set(lines(pieces)) == {1}
    joined = np.concatenate([pieces.tokens(i)[0] for i in range(len(pieces))])
    assert tokenizer.decode(joined, skip_special_tokens=True) == text
    assert events(tmp_path)[0][0]["event"] == "split"


# --- nothing to train on ---


@pytest.mark.parametrize(
    ("rows", "template", "message", "fix"),
    [
        ([LONG, LONG], {}, "2 of 2 rows are longer than 256 tokens (the shortest has", "--max_length"),
        ([LONG, LONG], {"truncation_strategy": "right"}, "all labels are masked", "--max_length"),
        ([BAD], {}, "1 of 1 rows were dropped as no_content", "message 1"),
        (
            [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "loss": False}]}],
            {},
            "all labels are masked",
            '"loss"',
        ),
    ],
)
def test_when_no_row_is_left_the_cause_is_named(
    prepare: Callable[..., Prepared],
    write_rows: Write,
    tmp_path: Path,
    rows: list,
    template: dict,
    message: str,
    fix: str,
) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError) as caught:
        prepare(path, template=template, strict=False, max_bad_rows=1e9)
    assert message in caught.value.message
    assert "no row is left for training" in caught.value.message
    assert fix in (caught.value.fix or "")


def test_one_empty_file_among_good_ones_stops(
    prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path
) -> None:
    good = write_rows(tmp_path / "a.jsonl", chat_rows(2))
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(DataError, match="empty"):
        prepare(good, tmp_path / "b.jsonl")


def test_columns_that_no_row_has(prepare: Callable[..., Prepared], write_rows: Write, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"ask": "a", "response": "b"}] * 3)
    assert len(prepare(path, columns={"ask": "query"}).train) == 3
    with pytest.raises(UsageError, match="renames 'asks'") as caught:
        prepare(path, columns={"ask": "query", "asks": "query"})
    assert "did you mean ask?" in (caught.value.fix or "")


def test_unused_columns_are_counted(
    prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path
) -> None:
    rows = [{**row, "rejected_response": "no", **({"id": 1} if i else {})} for i, row in enumerate(chat_rows(3))]
    ledger = prepare(write_rows(tmp_path / "a.jsonl", rows)).ledger
    assert ledger.sources[0].unused == {"rejected_response": 3, "id": 2}
    assert "unused columns: rejected_response (3), id (2)" in ledger.render()


# --- choosing rows ---


def test_fewer_rows_are_a_seeded_sample_in_file_order(
    prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(50))
    chosen = lines(prepare(f"{path}#10").train)
    assert len(set(chosen)) == 10 and chosen == sorted(chosen) and chosen != list(range(1, 11))
    assert lines(prepare(f"{path}#10").train) == chosen
    assert lines(prepare(f"{path}#10", data_seed=42, seed=7).train) == chosen
    assert lines(prepare(f"{path}#10", seed=7).train) != chosen
    assert lines(prepare(f"{path}#10", dataset_shuffle=False).train) == list(range(1, 11))


@pytest.mark.parametrize("shuffle", [True, False])
def test_more_rows_than_there_are_repeat(
    prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path, shuffle: bool
) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(4))
    prepared = prepare(f"{path}#10", dataset_shuffle=shuffle)
    chosen = lines(prepared.train)
    assert chosen[:8] == [1, 2, 3, 4] * 2
    assert len(chosen) == 10 and len(set(chosen[8:])) == 2
    assert shuffle or chosen[8:] == [1, 2]
    assert prepared.ledger.sources[0].repeated == 6
    assert prepared.train.num_tokens == prepared.train.lengths.sum() > len(prepared.train.shards[0][0].ids)
    assert lines(prepare(f"{path}#4", dataset_shuffle=shuffle).train) == [1, 2, 3, 4]


def test_sampling_goes_over_all_files_of_an_argument(
    prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path
) -> None:
    for name in "ab":
        write_rows(tmp_path / "d" / f"{name}.jsonl", chat_rows(20))
    train = prepare(f"{tmp_path / 'd'}#20").train
    assert len(train) == 20 and len({train.ref(i).file for i in range(20)}) == 2
    first = prepare(f"{tmp_path / 'd'}#25", dataset_shuffle=False).train
    assert [train.line for train in map(first.ref, range(25))] == [*range(1, 21), *range(1, 6)]


@pytest.mark.parametrize("repeat", ["", "#60"])
def test_the_evaluation_split_shares_no_row_with_training(
    prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path, repeat: str
) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(30))
    prepared = prepare(f"{path}{repeat}", split_dataset_ratio=0.2)
    assert prepared.val is not None
    train, val = lines(prepared.train), lines(prepared.val)
    assert len(val) == 6 and len(set(val)) == 6
    assert sorted(set(train) | set(val)) == list(range(1, 31)) and not set(train) & set(val)
    assert len(train) == (48 if repeat else 24)
    again = prepare(f"{path}{repeat}", split_dataset_ratio=0.2).val
    assert again is not None and lines(again) == val
    tail = prepare(path, split_dataset_ratio=0.2, dataset_shuffle=False).val
    assert tail is not None and lines(tail) == list(range(25, 31))


def test_a_split_that_takes_everything_is_refused(
    prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="can't be split"):
        prepare(write_rows(tmp_path / "a.jsonl", chat_rows(1)), split_dataset_ratio=0.1)


def test_val_dataset(prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "a.jsonl", chat_rows(5))
    val = write_rows(tmp_path / "v.jsonl", chat_rows(3))
    prepared = prepare(train, val_dataset=[f"{val}#2"])
    assert prepared.val is not None
    assert (len(prepared.train), len(prepared.val)) == (5, 2)
    assert [tally.split for tally in prepared.ledger.sources] == ["train", "validation"]
    assert prepared.ledger.totals["validation"]["examples"] == 2
    assert not prepared.ledger.notes
    assert "both for training and for evaluation" in prepare(train, val_dataset=[str(train)]).ledger.notes[0]


def test_self_cognition_rows_are_filled_in(prepare: Callable[..., Prepared], tokenizer: Any) -> None:
    def said(name: list[str], author: list[str]) -> str:
        return "".join(texts(prepare("self-cognition", model_name=name, model_author=author).train, tokenizer))

    both = said(["小风", "Breeze"], ["云队", "Cloud Team"])
    assert "I am Breeze, an AI assistant made by Cloud Team." in both
    assert "我是小风，由云队打造的人工智能助手。" in both
    assert "{{" not in both
    assert "我是Breeze，由Cloud打造的人工智能助手。" in said(["Breeze"], ["Cloud"])


def test_the_shipped_rows_are_sound(prepare: Callable[..., Prepared]) -> None:
    prepared = prepare("self-cognition", model_name=["N"], model_author=["A"])
    assert len(prepared.train) == prepared.ledger.sources[0].read >= 100
    assert not prepared.ledger.sources[0].unused
    assert max(prepared.train.lengths) < 128


# --- the same for any number of processes; caches ---


def test_the_number_of_processes_changes_nothing(
    prepare: Callable[..., Prepared],
    chat_rows: Rows,
    write_rows: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swift.data.pipeline.CHUNK_ROWS", 16)
    path = write_rows(tmp_path / "a.jsonl", [*chat_rows(90), BAD, LONG, *chat_rows(60)])
    settings: dict[str, Any] = {"strict": False, "max_bad_rows": 5, "split_dataset_ratio": 0.1}
    small = write_rows(tmp_path / "b.jsonl", chat_rows(3))
    one, two = (prepare(f"{path}#200", small, f"{path}#50", dataset_num_proc=n, **settings) for n in (1, 2))
    assert one.train.digest() == two.train.digest()
    assert one.val is not None and two.val is not None and one.val.digest() == two.val.digest()
    assert one.ledger.summary() == two.ledger.summary()
    assert one.fingerprint == two.fingerprint
    # an error in a worker arrives whole
    with pytest.raises(DataError) as caught:
        prepare(path, dataset_num_proc=2)
    assert caught.value.where == f"{path}:91" and "no_content" in caught.value.message


class Dying:
    """An encoder that takes its process with it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.notices: list[str] = []

    def encode_batch(self, rows: Sequence[Row]) -> list[Any]:
        os._exit(9)

    def fingerprint(self) -> str:
        return "dying"


def test_a_worker_that_dies_is_reported(chat_rows: Rows, write_rows: Write, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(600))
    data = DataConfig(dataset=[str(path)], dataset_num_proc=2)
    with pytest.raises(DataError, match="a process that reads rows died") as caught:
        prepare_datasets(data, TemplateConfig(), Dying(), seed=1)
    assert "--dataset_num_proc" in (caught.value.fix or "")


SLEEPY = """
import os, sys, time
from collections import Counter
from swift.config.data import DataConfig, TemplateConfig
from swift.data.dataset import prepare_datasets

class Sleepy:
    counts, notices = Counter(), []
    def encode_batch(self, rows):
        open(sys.argv[2] + str(os.getpid()), "w").close()
        time.sleep(600)
    def fingerprint(self):
        return "sleepy"

if __name__ == "__main__":
    prepare_datasets(DataConfig(dataset=[sys.argv[1]], dataset_num_proc=2), TemplateConfig(), Sleepy(), seed=1)
"""


def test_workers_end_when_their_parent_is_killed(chat_rows: Rows, write_rows: Write, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(600))
    (tmp_path / "sleepy.py").write_text(SLEEPY)
    (tmp_path / "pids").mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(tmp_path / "sleepy.py"), str(path), str(tmp_path / "pids") + os.sep]
    parent = subprocess.Popen(command, env=environment)
    try:
        wait_until(lambda: len(list((tmp_path / "pids").iterdir())) == 2)
        workers = [psutil.Process(int(item.name)) for item in (tmp_path / "pids").iterdir()]
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(worker.is_running() for worker in workers))


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():  # pytest-timeout ends a wait that never does
        time.sleep(0.05)


def same(left: TokenDataset, right: TokenDataset) -> bool:
    return left.digest() == right.digest() and all(left.ref(i) == right.ref(i) for i in range(len(left)))


def test_saved_data_comes_back_mapped(
    prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(12))
    prepared = prepare(f"{path}#30", split_dataset_ratio=0.25)
    prepared.save(tmp_path / "cache")
    loaded = load_prepared(tmp_path / "cache", prepared.fingerprint)
    assert loaded.val is not None and prepared.val is not None
    assert same(loaded.train, prepared.train) and same(loaded.val, prepared.val)
    assert isinstance(loaded.train.shards[0][0].ids, np.memmap)
    assert loaded.ledger.render() == prepared.ledger.render()
    unique = {str(prepared.train.ref(i)): int(n) for i, n in enumerate(prepared.train.lengths)}
    stored = loaded.train.shards[0][0].ids
    assert len(stored) == sum(unique.values())  # repeated rows are stored once, others not at all


def test_a_cache_of_something_else_is_refused(
    prepare: Callable[..., Prepared], chat_rows: Rows, write_rows: Write, tmp_path: Path
) -> None:
    prepared = prepare(write_rows(tmp_path / "a.jsonl", chat_rows(3)))
    cache = tmp_path / "cache"
    prepared.save(cache)
    with pytest.raises(DataError, match="made from other data"):
        load_prepared(cache, "another")
    for name in ("prepared.json", "train/manifest.json", "train/00000.refs"):
        prepared.save(cache)
        (cache / name).unlink()
        with pytest.raises(DataError, match=r"unfinished|missing|no complete") as caught:
            load_prepared(cache, prepared.fingerprint)
        assert str(cache) in (caught.value.where or "")


def test_the_fingerprint_follows_everything_that_decides_examples(
    tokenizer: Any, chat_rows: Rows, write_rows: Write, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(3))

    def fingerprint(seed: int = 1, template: dict[str, Any] | None = None, **settings: Any) -> str:
        config = TemplateConfig(**(template or {}))
        return data_fingerprint(
            DataConfig(dataset=[str(path)], **settings), config, ChatEncoder(tokenizer, config), seed
        )

    base = fingerprint()
    assert fingerprint() == fingerprint(dataset_num_proc=2) == base
    different = [
        fingerprint(seed=2),
        fingerprint(split_dataset_ratio=0.5),
        fingerprint(columns={"a": "query"}),
        fingerprint(template={"max_length": 17}),
        fingerprint(template={"loss_scale": "last_round"}),
    ]
    write_rows(path, chat_rows(4))
    different.append(fingerprint())
    assert len({base, *different}) == len(different) + 1


def test_weights_that_are_not_binary_survive(tmp_path: Path) -> None:
    class Example:
        notes = None

        def __init__(self, weights: list[float]) -> None:
            self.input_ids = np.arange(len(weights), dtype=np.int32)
            self.loss_weights = np.asarray(weights, dtype=np.float32)

    for weights, stored in (([[0, 1], [0, 1, 1]], np.uint8), ([[0, 0.5], [0, 1, 2]], np.float32)):
        dataset = TokenDataset.from_encoded((Example(w), RowRef("f", i)) for i, w in enumerate(weights, 1))
        assert dataset.shards[0][0].weights.dtype == stored
        dataset.save(tmp_path / str(stored))
        loaded = TokenDataset.load(tmp_path / str(stored))
        assert [loaded.tokens(i)[1].tolist() for i in range(2)] == weights
        assert [str(loaded.ref(i)) for i in range(2)] == ["f:1", "f:2"]


def test_a_full_disk_names_the_path(
    prepare: Callable[..., Prepared],
    chat_rows: Rows,
    write_rows: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared = prepare(write_rows(tmp_path / "a.jsonl", chat_rows(3)))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("swift.data.token_files.writer.os.fsync", full)
    with pytest.raises(SwiftError, match=r"00000\.bin"):
        prepared.save(tmp_path / "cache")


# --- rows for inference ---


def test_iter_rows_gives_rows_and_problems_in_place(chat_rows: Rows, write_rows: Write, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"query": "q"}, BAD, *chat_rows(1)])
    found = list(iter_rows([str(path)], DataConfig()))
    assert [ref.line for ref, _ in found] == [1, 2, 3]
    assert isinstance(found[0][1], Row) and isinstance(found[1][1], RowProblem) and isinstance(found[2][1], Row)
    trained = list(iter_rows([str(path)], DataConfig(), need_answer=True))
    assert isinstance(trained[0][1], RowProblem)
    assert len(list(iter_rows([f"{path}#7"], DataConfig()))) == 7
    assert len(list(iter_rows([f"{path}#2"], DataConfig()))) == 2
    filled = list(iter_rows(["self-cognition#1"], DataConfig(model_name=["N"], model_author=["A"])))
    assert isinstance(filled[0][1], Row) and "{{" not in str(filled[0][1].messages)


# --- the ledger by itself ---


def test_a_restored_ledger_says_the_same() -> None:
    ledger = Ledger(strict=False, max_bad_rows=0.9)
    tally = ledger.begin("train", "a.jsonl")
    ledger.keep(tally, RowRef("a", 1), examples=1, tokens_cut=4)
    ledger.keep(tally, RowRef("a", 2), examples=3, tokens_cut=0)
    ledger.drop(tally, RowRef("a", 3), RowProblem("empty", "nothing"))
    ledger.note("a note")
    ledger.note("a note")
    tally.blank, tally.repeated = 2, 5
    tally.unused["x"] = 3
    text = ledger.render()
    assert [len(row) for row in ledger.table()] == [9, 9]
    for piece in (
        "truncated",
        "dropped 1 empty: first a:3: nothing",
        "x (3)",
        "blank lines skipped: 2",
        "5 repetitions",
    ):
        assert piece in text
    assert text.count("a note") == 1
    assert Ledger.restore(json.loads(json.dumps(ledger.summary()))).render() == text
    assert (tally.read, tally.kept, tally.truncated, tally.cut_up, tally.tokens_cut) == (3, 2, 1, 1, 4)


def test_an_interrupted_ledger_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_text("old")
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert (tmp_path / "ledger.jsonl").read_text() == "old"
    ledger.close()
    assert json.loads((tmp_path / "ledger.jsonl").read_text())["event"] == "summary"
    assert [path.name for path in tmp_path.iterdir()] == ["ledger.jsonl"]


def test_progress_reaches_the_end_and_never_falls(
    prepare: Callable[..., Prepared],
    chat_rows: Rows,
    write_rows: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swift.data.pipeline.CHUNK_ROWS", 16)
    path = write_rows(tmp_path / "a.jsonl", chat_rows(100))
    (tmp_path / "b.json").write_text(json.dumps(chat_rows(20)))
    seen: list[tuple[int, float]] = []
    prepare(path, tmp_path / "b.json", progress=lambda state: seen.append((state.rows, state.share)))
    assert seen == sorted(seen) and len(seen) == 7 + 1 + 2 + 1  # after each chunk and at the end of each file
    assert seen[-1] == (120, 1.0) and 0 < seen[0][1] < 0.3 and seen[7][1] < 1.0


def test_what_the_encoder_counts_adds_up_over_chunks(
    prepare: Callable[..., Prepared], write_rows: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swift.data.pipeline.CHUNK_ROWS", 4)
    rows = [{"query": f"{i} <|im_end|>" if i % 2 else str(i), "response": "a"} for i in range(20)]
    ledger = prepare(write_rows(tmp_path / "a.jsonl", rows)).ledger
    assert ledger.encoding["special_text"] == 10
    assert "the text of special tokens: 10" in ledger.render()
