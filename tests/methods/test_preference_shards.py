"""`swift export --cached_for rlhf` and `kto`: units in token shards train as the rows do; other kinds are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from preference_rows import labelled_rows, pair_rows
from runs import assert_same_bits, trained

from swift.cli import main as swift
from swift.commands.export import export_dataset
from swift.commands.rlhf import rlhf
from swift.commands.sft import sft
from swift.config import ExportConfig, RlhfConfig, build_config
from swift.config.data import DataConfig
from swift.core.errors import DataError, UsageError
from swift.data.dataset import prepare_datasets
from swift.data.encoding.encode import ChatEncoder
from swift.data.encoding.units import UnitEncoder
from swift.data.units import Kind, Unit

slow = pytest.mark.slow
RUN: dict[str, Any] = {
    "max_steps": 3,
    "save_steps": 3,
    "eval_steps": 3,
    "logging_steps": 1,
    "max_length": 128,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "add_version": False,
    "report_to": ["none"],
}
Make = Callable[..., Path]


@pytest.fixture
def pairs(write_rows: Callable[..., Path], tmp_path: Path) -> Path:
    return write_rows(tmp_path / "pairs.jsonl", pair_rows(14, margins=True))


@pytest.fixture
def labelled(write_rows: Callable[..., Path], tmp_path: Path) -> Path:
    return write_rows(tmp_path / "labelled.jsonl", labelled_rows(14))


@pytest.fixture
def export(tiny_model_dir: Path, tmp_path: Path) -> Make:
    def run(rows: Path, kind: str, **flags: Any) -> Path:
        settings = {"model": str(tiny_model_dir), "dataset": [str(rows)], "max_length": 128, "cached_for": kind}
        settings |= {"output_dir": str(tmp_path / f"cached-{kind}"), "to_cached_dataset": True, **flags}
        return export_dataset(build_config(ExportConfig, settings))

    return run


def content(dataset: Any) -> list[Any]:
    return [
        (*(part.tolist() for part in dataset.tokens(i)), dataset.notes(i).tolist(), str(dataset.ref(i)))
        for i in range(len(dataset))
    ]


@pytest.mark.parametrize(("kind", "layout"), [("rlhf", "pairs"), ("kto", "binary")])
def test_the_units_are_those_of_the_rows(
    kind: str, layout: Any, export: Make, pairs: Path, labelled: Path, tokenizer: Any
) -> None:
    rows = pairs if kind == "rlhf" else labelled
    out = export(rows, kind, split_dataset_ratio=0.2)
    template = RlhfConfig().template
    template.max_length = 128

    def read(**data: Any) -> Any:
        encoder = UnitEncoder(ChatEncoder(tokenizer, template), layout)
        return prepare_datasets(DataConfig(**data), template, encoder, seed=42, row_layout=layout)

    fresh, cached = read(dataset=[str(rows)], split_dataset_ratio=0.2), read(cached_dataset=[str(out)])
    assert content(cached.train) == content(fresh.train) and content(cached.val) == content(fresh.val)
    assert cached.train.digest() == fresh.train.digest() and len(fresh.val) == 3
    units = [Unit.read(cached.train.notes(i)) for i in range(len(cached.train))]
    wanted = {(Kind.CHOSEN, Kind.REJECTED)} if kind == "rlhf" else {(Kind.CHOSEN,), (Kind.REJECTED,)}
    assert {unit.kinds for unit in units} == wanted
    if kind == "rlhf":
        assert {unit.values for unit in units} == {(0.0,), (0.25,), (0.5,)}
        assert np.all([unit.prefix > 0 for unit in units])


@pytest.mark.parametrize(
    "flags",
    [
        {"rlhf_type": "dpo"},
        pytest.param({"rlhf_type": "kto", "packing": True}, marks=slow),
        pytest.param({"rlhf_type": "dpo", "packing": True, "tuner_type": "full"}, marks=slow),
        pytest.param({"rlhf_type": "rm"}, marks=slow),
        pytest.param({"rlhf_type": "kto"}, marks=slow),
    ],
    ids=str,
)
def test_a_run_on_shards_is_the_run_on_rows(
    flags: dict[str, Any], export: Make, pairs: Path, labelled: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    kto = flags["rlhf_type"] == "kto"
    rows = labelled if kto else pairs
    out = export(rows, "kto" if kto else "rlhf", split_dataset_ratio=0.2)
    run = {**RUN, **flags, "model": str(tiny_model_dir)}
    fresh = rlhf(**run, dataset=[str(rows)], split_dataset_ratio=0.2, output_dir=str(tmp_path / "fresh"))
    cached = rlhf(**run, cached_dataset=[str(out)], output_dir=str(tmp_path / "cached"))

    def lines(folder: Path) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
        names = ("step", "loss", "grad_norm", "eval_loss", "rewards/chosen", "kto_z0")
        return [{name: line.get(name) for name in names} for line in found if "loss" in line or "eval_loss" in line]

    assert lines(fresh.run_dir) == lines(cached.run_dir) and len(lines(cached.run_dir)) >= 4
    assert_same_bits(trained(fresh.run_dir / "checkpoint-3"), trained(cached.run_dir / "checkpoint-3"))


def test_shards_of_another_kind_are_refused_by_name(
    export: Make, pairs: Path, labelled: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    run = {**RUN, "model": str(tiny_model_dir), "output_dir": str(tmp_path / "run"), "overwrite_output_dir": True}
    shards = {kind: str(export(labelled if kind == "kto" else pairs, kind)) for kind in ("sft", "rlhf", "kto")}
    words = {"sft": "conversations or texts", "rlhf": "pairs of answers", "kto": "answers with a label"}
    for made, train, flags, wanted in (
        ("sft", rlhf, {}, "rlhf"),
        ("rlhf", rlhf, {"rlhf_type": "kto"}, "kto"),
        ("kto", rlhf, {"rlhf_type": "rm"}, "rlhf"),
        ("rlhf", sft, {}, "sft"),
    ):
        with pytest.raises(DataError) as caught:
            train(**run, **flags, cached_dataset=[shards[made]])
        assert f"made of {words[made]}, and {words[wanted]} are trained on" in caught.value.message
        assert f"--cached_for {wanted}" in (caught.value.fix or "") and shards[made] in (caught.value.where or "")
    with pytest.raises(DataError, match="loss_scale is last_round in the shards and default here"):
        rlhf(**run, loss_scale="default", cached_dataset=[shards["rlhf"]])


def test_the_command_that_comes_next_is_told_and_works(
    pairs: Path, tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    words = ["export", "--model", str(tiny_model_dir), "--dataset", str(pairs), "--output_dir", str(out)]
    words += ["--to_cached_dataset", "true", "--template_mode", "rlhf", "--max_length", "96"]
    with caplog.at_level("INFO"):
        assert swift(words) == 0
    (told,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("next:")]
    assert told == f"next: swift rlhf --model {tiny_model_dir} --cached_dataset {out} --max_length 96"
    run = ["--max_steps", "1", "--report_to", "none", "--output_dir", str(tmp_path / "run")]
    assert swift([*told.split()[2:], *run]) == 0


def test_pairs_cant_be_split(export: Make, pairs: Path) -> None:
    with pytest.raises(UsageError, match="split"):
        export(pairs, "rlhf", truncation_strategy="split")
