"""Real training runs on streamed and mixed data: resumed = uninterrupted, bit for bit; and what stops them."""

import json
import os
import shutil
import signal
from collections import Counter

import pytest
from runs import BASE, assert_same_bits, read_log, run_cli, start_cli, trained, wait_for_step

from swift import sft
from swift.checkpoint import list_checkpoints
from swift.core.errors import CheckpointError, DataError, UsageError
from swift.training.trainer import Trainer

MIXED = {"interleave_prob": [0.7, 0.3], "stopping_strategy": "all_exhausted"}
PACKED = {"packing": True, "packing_length": 256}
EASY_FIRST = {"curriculum": {"difficulty": "length", "bins": 3, "weights": [[0, [1, 0, 0]], [6, [1, 1, 1]]]}}
BY_COLUMN = {"curriculum": {"difficulty": "level", "bins": [10], "weights": [[0, [1, 0]], [5, [0, 1]]]}}
VARIANTS = {
    "stream": {"streaming": True, "shuffle_buffer_size": 8},
    "stream-packed-mixed": {"streaming": True, **PACKED, **MIXED},
    "stream-padded": {"streaming": True, "padding_free": False},
    "map-mixed": MIXED,
    "map-packed-temperature": {**PACKED, "mix_temperature": 2.0},
    "map-curriculum": EASY_FIRST,
    "map-threads": {"dataloader_num_workers": 2},
}


@pytest.fixture
def flags(tiny_model_dir, chat_rows, write_rows, tmp_path):
    rows = [{**row, "level": number} for number, row in enumerate(chat_rows(34))]
    first = write_rows(tmp_path / "first.jsonl", rows[:22])
    second = write_rows(tmp_path / "second.jsonl", rows[22:])
    return {**BASE, "model": str(tiny_model_dir), "dataset": [str(first), str(second)]}


@pytest.fixture
def seen(monkeypatch):
    """(epoch, file, line) of every row as it is trained on."""
    rows = []
    original = Trainer.train_step

    def spy(self, batches):
        rows.extend((self.state.epoch, os.path.basename(r.file), r.line) for b in batches for r in b.refs)  # noqa: PTH119
        original(self, batches)

    monkeypatch.setattr(Trainer, "train_step", spy)
    return rows


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumed_equals_uninterrupted(variant, flags, tmp_path):
    flags |= VARIANTS[variant]
    whole = sft(**flags, output_dir=str(tmp_path / "whole"))
    assert whole.steps == 9
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "whole", other)
    for checkpoint in list_checkpoints(other):
        if checkpoint.step > 3:
            shutil.rmtree(checkpoint.path)
    resumed = sft(**flags, output_dir=str(other), resume_from_checkpoint="latest")
    assert read_log(other) == read_log(whole.run_dir)
    assert_same_bits(trained(resumed.last_checkpoint), trained(whole.last_checkpoint))
    assert len({line["loss"] for line in read_log(other)}) == 9


@pytest.mark.parametrize("streaming", [True, False])
def test_paths_may_be_spelt_anew_on_resume(streaming, flags, tmp_path, monkeypatch):
    """The printed resume command reads the settings back with whole paths, and may be typed in another folder."""
    flags |= {"streaming": streaming, **MIXED, "output_dir": str(tmp_path / "run")}
    monkeypatch.chdir(tmp_path)
    whole = sft(**{**flags, "dataset": ["first.jsonl", "second.jsonl"]})
    log = read_log(whole.run_dir)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    resumed = sft(resume_from_checkpoint=str(list_checkpoints(whole.run_dir)[0].path))
    assert read_log(resumed.run_dir) == log
    sources = json.loads((resumed.run_dir / "ledger.jsonl").read_text().splitlines()[-1])["sources"]
    assert [source["source"] for source in sources] == flags["dataset"]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kill_9_with_worker_processes(processes, flags, tmp_path):
    flags |= {"max_steps": 14, "nproc_per_node": processes, "streaming": True, **PACKED}
    whole = run_cli({**flags, "output_dir": tmp_path / "whole"})
    assert whole.returncode == 0, whole.stderr
    run_dir = tmp_path / "killed"
    process = start_cli({**flags, "output_dir": run_dir, "dataloader_num_workers": 2})
    wait_for_step(run_dir, 8, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    resumed = run_cli({**flags, "output_dir": run_dir, "resume_from_checkpoint": "latest"})
    assert resumed.returncode == 0, resumed.stderr
    assert read_log(run_dir) == read_log(tmp_path / "whole")
    assert_same_bits(trained(run_dir / "checkpoint-14"), trained(tmp_path / "whole/checkpoint-14"))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_another_number_of_processes_goes_on_with_the_same_rows(first, then, flags, tmp_path):
    """The same global batch on other ranks: the losses agree to rounding, so the rows of every step do."""
    flags |= {"max_steps": 10, "streaming": True, "lora_dropout": 0.0, **PACKED}
    whole = run_cli({**flags, "output_dir": tmp_path / "whole"})
    assert whole.returncode == 0, whole.stderr
    run_dir = tmp_path / "run"
    for processes, steps, resume in ((first, 3, {}), (then, 10, {"resume_from_checkpoint": "latest"})):
        ran = run_cli(
            {
                **flags,
                "output_dir": run_dir,
                "max_steps": steps,
                "nproc_per_node": processes,
                "gradient_accumulation_steps": 2 // processes,
                "lr_scheduler_type": "constant",
                **resume,
            }
        )
        assert ran.returncode == 0, ran.stderr
    reference = run_cli({**flags, "output_dir": tmp_path / "constant", "lr_scheduler_type": "constant"})
    assert reference.returncode == 0, reference.stderr
    for mine, theirs in zip(read_log(run_dir), read_log(tmp_path / "constant"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.parametrize("packed", [{}, PACKED], ids=["unpacked", "packed"])
def test_a_run_ends_with_the_data_of_its_epochs(packed, flags, seen, tmp_path, capfd):
    """No max_steps: the estimate is shown, and every row is seen exactly once an epoch."""
    flags |= {
        "streaming": True,
        "num_train_epochs": 2.0,
        "max_steps": -1,
        "output_dir": str(tmp_path / "run"),
        **packed,
    }
    result = sft(**flags)
    wanted = {("first.jsonl", n) for n in range(1, 23)} | {("second.jsonl", n) for n in range(1, 13)}
    counts = Counter(seen)
    assert set(counts) == {(epoch, *row) for epoch in (0, 1) for row in wanted}
    assert len(set(counts.values())) <= 2 and max(counts.values()) <= 3  # some rows make several examples
    out = capfd.readouterr().out
    assert "steps   about" in out and "about 34 rows an epoch (counted)" in out
    assert result.status == "finished"
    ledger = json.loads((tmp_path / "run/ledger.jsonl").read_text().splitlines()[-1])
    assert sum(source["read"] for source in ledger["sources"]) == 68


def test_mixed_shares_are_seen(flags, seen, tmp_path):
    flags |= {"interleave_prob": [0.25, 0.75], "max_steps": -1, "num_train_epochs": 1.0}
    sft(**flags, output_dir=str(tmp_path / "run"))
    files = Counter(name for _, name, _ in seen)
    assert files["second.jsonl"] >= 12
    assert files["first.jsonl"] / files["second.jsonl"] == pytest.approx(1 / 3, abs=0.1)


def test_easy_rows_come_first(flags, seen, tmp_path):
    """Levels 0 to 33 by a column, border 10: the first steps hold easy rows only, and each row comes once an epoch."""
    flags |= {**BY_COLUMN, "max_steps": -1, "num_train_epochs": 1.0, "truncation_strategy": "delete"}
    sft(**flags, output_dir=str(tmp_path / "run"))
    levels = [line - 1 if name == "first.jsonl" else 21 + line for _, name, line in seen]
    assert all(level < 10 for level in levels[:4])
    assert set(levels) == set(range(34))
    assert sum(level >= 10 for level in levels[-8:]) == 8


def test_a_changed_file_is_refused_on_resume(flags, write_rows, chat_rows, tmp_path):
    flags |= {"streaming": True, "output_dir": str(tmp_path / "run")}
    sft(**{**flags, "max_steps": 3})
    write_rows(tmp_path / "second.jsonl", chat_rows(13))
    with pytest.raises(DataError, match=r"changed since the run began") as caught:
        sft(**{**flags, "max_steps": 6}, resume_from_checkpoint="latest")
    assert "second.jsonl" in caught.value.where


def test_self_cognition_rows_under_another_name_are_refused_on_resume(flags, tmp_path):
    flags |= {"streaming": True, "output_dir": str(tmp_path / "run"), "dataset": ["self-cognition"]}
    flags |= {"model_name": ["Ada"], "model_author": ["Lin"]}
    sft(**{**flags, "max_steps": 3})
    with pytest.raises(CheckpointError, match="data"):
        sft(**{**flags, "max_steps": 6, "model_name": ["Eve"]}, resume_from_checkpoint="latest")


def test_a_position_of_another_order_is_refused(flags, tmp_path):
    flags |= {"output_dir": str(tmp_path / "run")}
    first = sft(**{**flags, "max_steps": 3})
    for change in ({"streaming": True}, MIXED, {"seed": 7}):
        with pytest.raises((CheckpointError, DataError)):
            sft(**{**flags, "max_steps": 6, **change}, resume_from_checkpoint="latest")
    from swift.checkpoint.store import describe_files

    folder = first.last_checkpoint
    (folder / "data_state.json").unlink()
    (folder / "complete.json").write_text(json.dumps({"files": describe_files(folder)}))
    with pytest.raises(CheckpointError, match=r"data_state\.json"):
        sft(**{**flags, "max_steps": 6}, resume_from_checkpoint="latest")


def test_a_stream_without_anything_to_train_on_says_why(flags, tmp_path):
    with pytest.raises(DataError, match="longer than 4 tokens"):
        sft(**{**flags, "streaming": True, "max_length": 4}, output_dir=str(tmp_path / "run"))


def test_settings_that_exclude_each_other(flags, tmp_path):
    flags |= {"output_dir": str(tmp_path / "run")}
    wrong = [
        ({"interleave_prob": [0.5]}, "1 value"),
        ({"interleave_prob": [0.5, 0.5], "mix_temperature": 2.0}, "both give the shares"),
        ({"stopping_strategy": "all_exhausted"}, "aren't mixed"),
        ({"streaming": True, "split_dataset_ratio": 0.1}, "val_dataset"),
        ({"streaming": True, **EASY_FIRST}, "difficulty bins"),
        ({"curriculum": {"weights": [[0, [1, 0, 0]]]}}, "3 weights"),
        ({"curriculum": {"weights": []}}, "curriculum"),
        ({"curriculum": {"weight": [[0, [1, 0]]]}}, "weights"),
    ]
    for change, words in wrong:
        with pytest.raises(UsageError, match=words):
            sft(**{**flags, **change})
