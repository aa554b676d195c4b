"""Recipes that end in tokens: the examples are those of training on the cleaned text, however the tasks were run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swift.config.data import DataConfig, TemplateConfig
from swift.core.errors import DataError, UsageError
from swift.data.dataset import prepare_datasets
from swift.data.encoding.encode import ChatEncoder
from swift.data.engine.run import RunOptions, run_recipe
from swift.data.engine.summary import LEDGER, MANIFEST, closing_lines
from swift.data.operators.pack_tokens import packed
from swift.data.rows import RowRef
from swift.data.token_files.shards import REF, Examples, verify_folder
from swift.data.token_files.sink import Shard, ref_of
from swift.data.token_files.store import TokenDataset

Write = Callable[..., Path]
PT = {"use_chat_template": False, "loss_scale": "all", "truncation_strategy": "split"}


@pytest.fixture
def texts(write_rows: Write, tmp_path: Path) -> Path:
    rows = [
        {"id": i, "text": f"Ｎumber {i}: " + " ".join(f"{i}wörd{k}" for k in range(1 + 3 * (i % 7)))} for i in range(50)
    ]
    rows[7]["text"] = "   "
    rows[9]["text"] = "before <|im_end|> after"
    return write_rows(tmp_path / "in" / "texts.jsonl", rows)


def recipe(source: Path, output: Path, *steps: Any, **more: Any) -> dict[str, Any]:
    return {"input": str(source), "output": {"path": str(output)}, "steps": list(steps), **more}


def run(*args: Any, **more: Any) -> None:
    run_recipe(recipe(*args, **more), options=RunOptions(quiet=True))


def encoder(tokenizer: Any, **settings: Any) -> ChatEncoder:
    return ChatEncoder(tokenizer, TemplateConfig(**settings))


def content(dataset: TokenDataset) -> list[tuple[list[int], list[float]]]:
    return [(ids.tolist(), weights.tolist()) for ids, weights in dataset]


def trained_on(tokenizer: Any, settings: dict, **data: Any) -> TokenDataset:
    config = TemplateConfig(**settings)
    return prepare_datasets(DataConfig(**data), config, ChatEncoder(tokenizer, config), seed=42).train


@pytest.mark.parametrize("num_proc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_examples_are_those_of_pt_on_the_cleaned_text(
    texts: Path, tiny_model_dir: Path, tokenizer: Any, tmp_path: Path, num_proc: int
) -> None:
    length = {"min_characters": 5}
    run(texts, tmp_path / "clean", {"normalise": {}}, {"length": length}, shard_size="2KB")
    tokenise = {"tokenise": {"model": str(tiny_model_dir), "max_length": 32}}
    how = {"shard_size": "2KB", "executor": {"num_proc": num_proc}}
    run(texts, tmp_path / "tokens", {"normalise": {}}, {"length": length}, tokenise, **how)
    settings = {**PT, "max_length": 32}
    fresh = trained_on(tokenizer, settings, dataset=[str(tmp_path / "clean")])
    cached = trained_on(tokenizer, settings, cached_dataset=[str(tmp_path / "tokens")])
    assert len(cached.shards) > 1  # several tasks wrote them
    assert content(cached) == content(fresh) and len(fresh) > 60
    verify_folder(tmp_path / "tokens")
    manifest = json.loads((tmp_path / "tokens" / "manifest.json").read_text())
    assert (manifest["rows"], manifest["examples"], manifest["tokens"]) == (49, len(fresh), fresh.num_tokens)
    assert str(cached.ref(0)).endswith("texts.jsonl:1")


def test_conversations_for_sft(
    chat_rows: Callable[[int], list], write_rows: Write, tiny_model_dir: Path, tokenizer: Any, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "chat.jsonl", [*chat_rows(20), {"messages": [{"role": "user", "content": "alone"}]}])
    tokenise = {
        "tokenise": {"model": str(tiny_model_dir), "cached_for": "sft", "system": "Be brief.", "max_length": 90}
    }
    run(rows, tmp_path / "tokens", tokenise)
    settings = {"max_length": 90, "system": "Be brief."}
    fresh = trained_on(tokenizer, settings, dataset=[str(rows)], strict=False, max_bad_rows=1)
    assert content(trained_on(tokenizer, settings, cached_dataset=[str(tmp_path / "tokens")])) == content(fresh)
    with pytest.raises(DataError) as caught:
        trained_on(tokenizer, {**settings, "max_length": 64}, cached_dataset=[str(tmp_path / "tokens")])
    told = "--max_length 90, or write max_length: 64 into the recipe's last step and make them again: swift data run"
    assert told in str(caught.value.fix)
    with pytest.raises(DataError, match="the system prompt"):
        trained_on(tokenizer, {"max_length": 90}, cached_dataset=[str(tmp_path / "tokens")])
    entries = json.loads((tmp_path / "tokens" / "_ledger.json").read_text())["operators"]
    (entry,) = [each for each in entries if each["label"] == "tokenise"]
    assert entry["tally"]["kept"] == 15 and entry["tally"]["characters_in"] > 1000
    assert entry["tally"]["dropped"] == {"no_assistant": 1, "too_long": 5}
    ledger, manifest = (json.loads((tmp_path / "tokens" / name).read_text()) for name in (LEDGER, MANIFEST))
    assert (
        closing_lines(ledger, manifest, tmp_path / "tokens")[-1]
        == f"next:   swift sft --cached_dataset {tmp_path}/tokens"
    )


def test_packed_rows(texts: Path, tiny_model_dir: Path, tokenizer: Any, tmp_path: Path) -> None:
    run(
        texts,
        tmp_path / "packed",
        {"length": {"min_characters": 5}},
        {"pack_tokens": {"model": str(tiny_model_dir), "length": 64}},
    )
    settings = {**PT, "max_length": 64}
    rows = trained_on(tokenizer, settings, cached_dataset=[str(tmp_path / "packed")])
    with pytest.raises(DataError) as caught:
        trained_on(tokenizer, {**PT, "max_length": 32}, cached_dataset=[str(tmp_path / "packed")])
    assert "write length: 32 into the recipe's last step" in str(caught.value.fix)
    run(texts, tmp_path / "clean", {"length": {"min_characters": 5}})
    documents = trained_on(tokenizer, settings, dataset=[str(tmp_path / "clean")])
    assert rows.num_tokens == documents.num_tokens and rows.trained_tokens() == documents.trained_tokens()
    assert rows.lengths.max() <= 64 and rows.num_tokens / (64 * len(rows)) > 0.9
    waiting = Counter((tuple(ids), tuple(weights)) for ids, weights in content(documents))
    for ids, weights in content(rows):  # each row is whole documents end to end, each with its own weights
        while ids:
            cut = next(n for n in range(len(ids), 0, -1) if waiting[tuple(ids[:n]), tuple(weights[:n])] > 0)
            waiting[tuple(ids[:cut]), tuple(weights[:cut])] -= 1
            ids, weights = ids[cut:], weights[cut:]
    assert not +waiting
    with pytest.raises(DataError, match="--max_length 64"):
        trained_on(tokenizer, {**PT, "max_length": 2048}, cached_dataset=[str(tmp_path / "packed")])


def test_packing_loses_nothing_over_many_windows() -> None:
    rng = np.random.default_rng(5)
    lengths = np.clip(rng.lognormal(2.5, 0.8, 9000).astype(int), 2, 64)
    total = int(lengths.sum())
    numbers = np.arange(total, dtype=np.int32)

    def batches() -> Any:
        start = 0
        for at in range(0, len(lengths), 100):
            piece = lengths[at : at + 100]
            ids = numbers[start : start + piece.sum()]
            start += int(piece.sum())
            refs = np.array([(at + i, 0) for i in range(len(piece))], dtype=REF)
            yield Examples(ids, np.ones(len(ids), np.float32), piece, refs)

    shard = Shard()
    rows = list(packed(batches(), 64, shard))
    assert len(rows) > 3
    ids = np.concatenate([row.ids for row in rows])
    sizes = np.concatenate([row.lengths for row in rows])
    assert np.array_equal(np.sort(ids), numbers) and sizes.max() <= 64
    assert total / (64 * len(sizes)) > 0.995
    ends = set(np.cumsum(lengths).tolist())
    for row in np.split(ids, np.cumsum(sizes)[:-1]):
        breaks = np.flatnonzero(np.diff(row) != 1)
        assert all(int(row[b]) + 1 in ends for b in breaks) and int(row[-1]) + 1 in ends  # documents stay whole


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"tokenise": {}}, "need a tokenizer"),
        ({"tokenise": {"model": "m", "max_length": 1}}, "leaves nothing"),
        ({"tokenise": {"model": "m", "cached_for": "sft", "truncation_strategy": "split"}}, "can't be split"),
        ({"pack_tokens": {"model": "m", "length": 64, "max_length": 32}}, "disagree"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_meant(texts: Path, tmp_path: Path, step: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run(texts, tmp_path / "out", step)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_nothing_left(texts: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document is left"):
        run(
            texts, tmp_path / "out", {"length": {"min_characters": 10**6}}, {"tokenise": {"model": str(tiny_model_dir)}}
        )
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_ids_of_documents_become_refs() -> None:
    assert ref_of("a/b.jsonl:12") == RowRef("a/b.jsonl", 12)
    assert ref_of("s3://x/y.jsonl@900") == RowRef("s3://x/y.jsonl", 900, True)
    assert ref_of("odd") == RowRef("odd", 0)
