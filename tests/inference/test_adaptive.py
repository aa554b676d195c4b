"""Adaptive inference as a whole on tiny models. Times are made up: each way has a clock that ticks as the test says."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import build_tiny_model, make_tokenizer, write_jsonl

from swift.config import InferConfig, build_config
from swift.config.data import PromptConfig
from swift.config.inference import GenerationConfig
from swift.core.errors import UsageError
from swift.data.encoding.encode import ChatEncoder
from swift.data.rows import Row, RowRef
from swift.inference.adaptive.adapt import adapted
from swift.inference.adaptive.candidates import Candidate
from swift.inference.adaptive.gate import gate_texts
from swift.inference.loading import Prepared, load_engine, prepare

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"Say {word}."},
            {"role": "assistant", "content": f"{word} {word} {word}"},
        ]
    }
    for word in ("rain", "paris", "seven", "music", "stone")
]


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt to answer: its first two layers did, the last two do almost nothing."""
    from transformers import AutoModelForCausalLM

    folder = build_tiny_model(tmp_path_factory.mktemp("four") / "four", num_hidden_layers=4)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    for layer in model.model.layers[2:]:
        layer.self_attn.o_proj.weight.data.mul_(1e-3)
        layer.mlp.down_proj.weight.data.mul_(1e-3)
        layer.requires_grad_(False)
    tokenizer = make_tokenizer()
    encoder = ChatEncoder(tokenizer, PromptConfig())
    rows = [encoder.encode(Row(RowRef("chats", 1), messages=chat["messages"]))[0] for chat in CHATS]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(12):
        for row in rows:
            ids = torch.from_numpy(row.input_ids).long()[None]
            labels = ids.masked_fill(torch.from_numpy(row.loss_weights)[None] == 0, -100)
            model(ids, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", CHATS)


def ticking(**steps: float) -> Callable[[Candidate], Callable[[], float]]:
    """A clock that goes on by so many seconds whenever it is read; by the first letters of a way's name."""

    def clock_for(way: Candidate) -> Callable[[], float]:
        step = next((steps[key] for key in steps if way.name.startswith(key)), 1.0)
        ticks = count()
        return lambda: next(ticks) * step

    return clock_for


def undecided(folder: Path, tmp_path: Path, **flags: Any) -> Prepared:
    """What `prepare` decides on; without reading a decision of the real cache folder."""
    settings = {
        "model": str(folder),
        "device": "cpu",
        "torch_dtype": "float32",  # the same ways on any CPU
        "weight_format": "auto",
        "kv_cache_gib": 0.01,
        "max_batch_size": 2,
        "adaptive_latency_ms": 10.0,
        "adaptive_report": str(tmp_path / "report.json"),
        **flags,
    }
    config = build_config(InferConfig, settings)
    prepared = prepare(config)
    engine = replace(prepared.config.engine, adaptive=True)
    # bfloat16 is as the test wants it, not as this processor is
    return replace(
        prepared, config=replace(prepared.config, engine=engine), device=replace(prepared.device, bf16=False)
    )


@pytest.fixture(autouse=True)
def only_whole_weights(monkeypatch):
    monkeypatch.setattr("swift.inference.adaptive.adapt.has_products", lambda: False)


def report(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "report.json").read_text())


def test_the_exact_way_where_it_is_fast_enough(four_layers: Path, rows: Path, tmp_path: Path) -> None:
    prepared = undecided(four_layers, tmp_path, adaptive_eval_file=str(rows), adaptive_skip_layers=["last:2"])
    decided = adapted(prepared, clock_for=ticking(float32=0.001))
    assert decided.config.engine.skip_layers == [] and decided.config.engine.kv_cache_dtype == "auto"
    assert not decided.config.engine.adaptive
    found = report(tmp_path)
    assert found["chosen"] == "float32" and found["meets_latency"]
    (trial,) = found["trials"]
    assert trial["token_ms"]["1"] == pytest.approx(1.0)
    assert set(found["untried"].values()) == {"a more exact one fits"}
    settings = GenerationConfig(max_new_tokens=8, temperature=0)
    plain = build_config(InferConfig, {"model": str(four_layers), "device": "cpu", "kv_cache_gib": 0.01})
    with decided.load() as engine, load_engine(plain) as usual:
        assert engine.generate([[5, 6, 7]], settings) == usual.generate([[5, 6, 7]], settings)


def test_fewer_layers_where_they_are_fast_and_good_enough(four_layers: Path, rows: Path, tmp_path: Path) -> None:
    prepared = undecided(
        four_layers,
        tmp_path,
        adaptive_eval_file=str(rows),
        adaptive_skip_layers=["0", "last:2"],
        kv_cache_dtype="float32",
    )
    decided = adapted(prepared, clock_for=ticking(without=0.001, float32=1.0))
    assert decided.config.engine.skip_layers == [2, 3]
    found = report(tmp_path)
    assert [(trial["name"], trial["verdict"]) for trial in found["trials"]] == [
        ("float32", "too slow"),
        ("without layer 0, float32", "not good enough"),
        ("without layers 2-3, float32", "fits"),
    ]
    assert [len(trial["token_ms"]) for trial in found["trials"]] == [2, 0, 2]  # a bad one isn't timed
    exact, without_first, without_last = (trial["loss"] for trial in found["trials"])
    assert abs(without_last - exact) < 0.01 < without_first - exact
    with decided.load() as engine:
        assert engine.generate([[5, 6, 7]], GenerationConfig(max_new_tokens=4))


def test_never_a_bad_one_but_the_fastest_good_one(
    four_layers: Path, rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = undecided(four_layers, tmp_path, adaptive_eval_file=str(rows), adaptive_skip_layers=["0,1"])
    clocks = {"without": 1e-6, "float32, bfloat16 KV": 0.5, "float32": 1.0}
    with caplog.at_level(logging.INFO, logger="swift"):
        decided = adapted(prepared, clock_for=ticking(**clocks))
    assert decided.config.engine.kv_cache_dtype == "bfloat16" and decided.config.engine.skip_layers == []
    assert not report(tmp_path)["meets_latency"]
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "500.00 ms" in warning and "wanted 10" in warning


def test_unsteady_times_are_said(four_layers: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A clock that goes slower and slower."""

    def slower(way: Candidate) -> Callable[[], float]:
        ticks = count()
        return lambda: 1e-6 * next(ticks) ** 2

    with caplog.at_level(logging.INFO, logger="swift"):
        adapted(undecided(four_layers, tmp_path, adaptive_latency_ms=1e9), clock_for=slower)
    assert report(tmp_path)["trials"][0]["unsteadiness"] > 1.5
    assert any("from round to round" in r.message for r in caplog.records if r.levelno == logging.WARNING)


def test_the_loss_is_that_of_training(four_layers: Path, rows: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    prepared = undecided(four_layers, tmp_path, adaptive_eval_file=str(rows))
    adapted(prepared, clock_for=ticking(float32=0.001))
    model = AutoModelForCausalLM.from_pretrained(four_layers, dtype=torch.float64)
    total, weight = 0.0, 0.0
    for row in gate_texts(str(rows), prepared.encoder):
        ids, weights = torch.tensor([row.tokens]), torch.tensor(row.weights[1:], dtype=torch.float64)
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        total += float((losses * weights).sum())
        weight += float(weights.sum())
    assert report(tmp_path)["trials"][0]["loss"] == pytest.approx(total / weight, rel=1e-5)


def test_a_smaller_sibling(four_layers: Path, tiny_model_dir: Path, rows: Path, tmp_path: Path) -> None:
    flags = {"adaptive_eval_file": str(rows), "adaptive_siblings": [str(tiny_model_dir)]}
    prepared = undecided(four_layers, tmp_path, **flags, adaptive_max_loss_increase=1000)
    decided = adapted(prepared, clock_for=ticking(sibling=0.001, float32=1.0))
    assert decided.base == tiny_model_dir and report(tmp_path)["settings"]["model"] == str(tiny_model_dir)
    with decided.load() as engine:
        assert len(engine.backend._served[0].shapes) == 2


def test_a_sibling_of_other_tokens(four_layers: Path, tiny_model_copy: Path, rows: Path, tmp_path: Path) -> None:
    path = tiny_model_copy / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "additional_special_tokens": ["<|other|>"]}))
    prepared = undecided(four_layers, tmp_path, adaptive_eval_file=str(rows), adaptive_siblings=[str(tiny_model_copy)])
    with pytest.raises(UsageError, match="another tokenizer"):
        adapted(prepared)


def test_without_rows_nothing_that_changes_answers(
    four_layers: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="swift"):
        decided = adapted(undecided(four_layers, tmp_path), clock_for=ticking(float32=1.0))
    assert decided.config.engine.kv_cache_dtype == "auto"
    assert [trial["name"] for trial in report(tmp_path)["trials"]] == ["float32"]
    assert any("no --adaptive_eval_file" in r.message and "bfloat16 KV" in r.message for r in caplog.records)


def test_the_next_start_takes_the_decision(
    four_layers: Path, rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(step: float, **flags: Any) -> tuple[str, bool]:
        """What is taken, and whether anything was measured for it."""
        caplog.clear()
        prepared = undecided(four_layers, tmp_path, adaptive_eval_file=str(rows), **flags)
        with caplog.at_level(logging.INFO, logger="swift"):
            decided = adapted(prepared, clock_for=ticking(**{"float32, bfloat16 KV": 0.001, "float32": step}))
        measured = any("measuring" in r.message for r in caplog.records)
        return decided.config.engine.kv_cache_dtype, measured

    assert start(1.0) == ("bfloat16", True)
    assert start(0.001) == ("bfloat16", False)
    assert start(0.001, adaptive_latency_ms=11.0) == ("auto", True)
    rows.write_text(rows.read_text() + rows.read_text())
    assert start(1.0, adaptive_latency_ms=11.0) == ("bfloat16", True)
    (four_layers / "config.json").touch()
    assert start(0.001, adaptive_latency_ms=11.0) == ("auto", True)


def test_several_processes_take_a_decision_and_make_none(
    four_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = undecided(four_layers, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="no decision yet"):
        adapted(prepared)
    monkeypatch.delenv("WORLD_SIZE")
    adapted(prepared, clock_for=ticking(float32=0.001))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert adapted(prepared).config.engine.infer_backend == "swift"


def test_rows_without_answers_and_other_files_are_refused(four_layers: Path, rows: Path, tmp_path: Path) -> None:
    rows.write_text(rows.read_text() + '{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(UsageError, match=r"rows\.jsonl:6"):
        adapted(undecided(four_layers, tmp_path, adaptive_eval_file=str(rows)))
    (tmp_path / "report.json").write_text('{"mine": 1}')
    with pytest.raises(UsageError, match="holds something else"):
        adapted(undecided(four_layers, tmp_path))
    assert (tmp_path / "report.json").read_text() == '{"mine": 1}'


def test_a_row_beyond_the_context_stops_the_start(four_layers: Path, rows: Path, tmp_path: Path) -> None:
    long = {"role": "user", "content": "why " * 1200}
    rows.write_text(rows.read_text() + json.dumps({"messages": [long, {"role": "assistant", "content": "so"}]}) + "\n")
    with pytest.raises(UsageError, match=r"rows\.jsonl:6: "):
        adapted(undecided(four_layers, tmp_path, adaptive_eval_file=str(rows)), clock_for=ticking(float32=0.001))


def test_a_smaller_model_that_cannot_read_the_rows_is_not_taken(four_layers: Path, rows: Path, tmp_path: Path) -> None:
    small = build_tiny_model(tmp_path / "small", max_position_embeddings=16)
    prepared = undecided(four_layers, tmp_path, adaptive_eval_file=str(rows), adaptive_siblings=[str(small)])
    decided = adapted(prepared, clock_for=ticking(sibling=0.001, float32=1.0))
    assert decided.base == four_layers
    (trial,) = [trial for trial in report(tmp_path)["trials"] if trial["name"].startswith("sibling")]
    assert trial["verdict"] == "can't be run" and "rows.jsonl:1" in trial["problem"]


def test_prepare_decides(four_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real clock, with a latency that anything meets; kept in the cache folder."""
    monkeypatch.setenv("SWIFT_CACHE", str(tmp_path / "cache"))
    flags = {"model": str(four_layers), "device": "cpu", "kv_cache_gib": 0.01, "max_batch_size": 2}
    config = build_config(InferConfig, {**flags, "adaptive": True, "adaptive_latency_ms": 1e9})
    prepared = prepare(config)
    assert (prepared.config.engine.adaptive, prepared.config.engine.infer_backend) == (False, "swift")
    (path,) = (tmp_path / "cache" / "adaptive").glob("*.json")
    assert json.loads(path.read_text())["chosen"] == "float32"


def test_skipping_layers_by_hand_is_part_of_what_answers_depend_on(four_layers: Path) -> None:
    flags = {"model": str(four_layers), "device": "cpu", "kv_cache_gib": 0.01}
    prepared = prepare(build_config(InferConfig, {**flags, "skip_layers": [3]}))
    assert prepared.identity()["skip_layers"] == [3]
    assert "skip_layers" not in prepare(build_config(InferConfig, flags)).identity()
    with prepared.load() as engine:
        assert list(engine.backend._served[0].shapes) == [0, 1, 2]
