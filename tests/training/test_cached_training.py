"""Training on token shards is training on the rows: the same numbers, bit for bit, however the shards came about."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import BASE, assert_same_bits, read_log, run_cli, trained

from swift import pt, sft
from swift.commands.export import export_dataset
from swift.config import ExportConfig, build_config

FLAGS = {**BASE, "max_steps": 5, "save_steps": 5, "eval_steps": 5}


@pytest.fixture
def rows(chat_rows: Callable[[int], list], write_rows: Callable[..., Path], tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", chat_rows(24))


def export(model: Path, output: Path, **flags: Any) -> str:
    settings = {"model": str(model), "to_cached_dataset": True, "output_dir": str(output), "max_length": 128, **flags}
    return str(export_dataset(build_config(ExportConfig, settings)))


def evaluations(run_dir: Path) -> list[float]:
    lines = map(json.loads, (run_dir / "logging.jsonl").read_text().splitlines())
    return [line["eval_loss"] for line in lines if "eval_loss" in line]


def assert_same_run(first: Path, second: Path) -> None:
    assert read_log(first) == read_log(second) and len(read_log(first)) == 5
    assert evaluations(first) == evaluations(second)
    assert_same_bits(trained(first / "checkpoint-5"), trained(second / "checkpoint-5"))


@pytest.mark.parametrize("packing", [False, True])
def test_sft_on_shards_is_sft_on_rows(tiny_model_dir: Path, rows: Path, tmp_path: Path, packing: bool) -> None:
    out = export(tiny_model_dir, tmp_path / "out", dataset=[str(rows)], split_dataset_ratio=0.2)
    flags = {**FLAGS, "model": str(tiny_model_dir), "packing": packing, "gradient_accumulation_steps": 1}
    fresh = sft(dataset=[str(rows)], split_dataset_ratio=0.2, output_dir=str(tmp_path / "fresh"), **flags)
    cached = sft(cached_dataset=[out], output_dir=str(tmp_path / "cached"), **flags)
    assert_same_run(fresh.run_dir, cached.run_dir)
    assert len(evaluations(cached.run_dir)) == 1
    for run in (fresh, cached):
        assert not list(run.run_dir.glob(".tokens")) and not list(run.run_dir.glob(".preparing"))


def test_a_run_on_rows_goes_on_with_shards(tiny_model_dir: Path, rows: Path, tmp_path: Path) -> None:
    out = export(tiny_model_dir, tmp_path / "out", dataset=[str(rows)])
    flags = {**FLAGS, "model": str(tiny_model_dir), "gradient_accumulation_steps": 1, "save_steps": 2}
    whole = sft(cached_dataset=[out], output_dir=str(tmp_path / "whole"), **flags)
    first = sft(dataset=[str(rows)], output_dir=str(tmp_path / "first"), **flags)
    resumed = sft(
        cached_dataset=[out],
        dataset=[],
        output_dir=str(tmp_path / "second"),
        resume_from_checkpoint=str(first.run_dir / "checkpoint-2"),
        **flags,
    )
    last = resumed.run_dir / "checkpoint-5"
    assert_same_bits(trained(whole.run_dir / "checkpoint-5"), trained(last))


def test_pt_on_the_tokens_of_a_recipe(tiny_model_dir: Path, write_rows: Callable[..., Path], tmp_path: Path) -> None:
    from swift.data.engine.run import RunOptions, run_recipe

    rows = [{"text": f"Ｎumber {i} " + " ".join(f"rain{k}" for k in range(i % 40))} for i in range(40)]
    source = write_rows(tmp_path / "text.jsonl", rows)
    steps: list[Any] = [{"normalise": {}}]
    quiet = RunOptions(quiet=True)
    run_recipe({"input": str(source), "output": str(tmp_path / "clean"), "steps": steps}, options=quiet)
    steps.append({"tokenise": {"model": str(tiny_model_dir), "max_length": 128}})
    run_recipe({"input": str(source), "output": str(tmp_path / "tokens"), "steps": steps}, options=quiet)
    flags = {**FLAGS, "model": str(tiny_model_dir), "eval_strategy": "no"}
    fresh = pt(dataset=[str(tmp_path / "clean")], output_dir=str(tmp_path / "fresh"), **flags)
    cached = pt(cached_dataset=[str(tmp_path / "tokens")], output_dir=str(tmp_path / "cached"), **flags)
    assert_same_run(fresh.run_dir, cached.run_dir)


@pytest.mark.slow
def test_two_ranks_map_the_same_shards(tiny_model_dir: Path, rows: Path, tmp_path: Path) -> None:
    out = export(tiny_model_dir, tmp_path / "out", dataset=[str(rows)], split_dataset_ratio=0.2)
    flags = {**FLAGS, "model": str(tiny_model_dir), "gradient_accumulation_steps": 1, "nproc_per_node": 2}
    sources = {"fresh": {"dataset": str(rows), "split_dataset_ratio": 0.2}, "cached": {"cached_dataset": out}}
    for name, source in sources.items():
        done = run_cli({**flags, **source, "output_dir": str(tmp_path / name)})
        assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "fresh", tmp_path / "cached")
    assert not list((tmp_path / "cached").glob(".tokens"))


@pytest.mark.slow
def test_a_refusal_reaches_both_ranks(tiny_model_dir: Path, rows: Path, tmp_path: Path) -> None:
    out = export(tiny_model_dir, tmp_path / "out", dataset=[str(rows)])
    flags = {**FLAGS, "model": str(tiny_model_dir), "nproc_per_node": 2, "max_length": 100}
    done = run_cli({**flags, "cached_dataset": out, "output_dir": str(tmp_path / "run")})
    assert done.returncode != 0 and "max_length is 128 in the shards and 100 here" in done.stderr + done.stdout
