"""The checkpoint store apart from training: names, order, retention, leftovers, and many kills."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors import SafetensorError

from swift.checkpoint import (
    RunState,
    clear,
    find_checkpoint,
    list_checkpoints,
    load_tensors,
    prune,
    save_checkpoint,
    save_tensors,
    set_aside,
    verify,
)
from swift.checkpoint.store import link
from swift.core.errors import CheckpointError


def put(run_dir, step, text="x"):
    return save_checkpoint(run_dir, step, [lambda folder: (folder / "file").write_text(text)])


def test_saves_are_listed_in_order_of_steps(tmp_path):
    for step in (10, 9, 100):
        put(tmp_path, step)
    assert [c.step for c in list_checkpoints(tmp_path)] == [9, 10, 100]


def test_a_failed_writer_leaves_nothing(tmp_path):
    put(tmp_path, 1)

    def fail(folder):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="could not write") as caught:
        save_checkpoint(tmp_path, 2, [fail], needed_bytes=123)
    assert "intact: checkpoint-1" in caught.value.where
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1"]


@pytest.mark.parametrize(
    "error",
    [
        KeyError("name"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("shape mismatch"),
        SafetensorError("Some tensors share memory"),
        Exception("the vocabulary has holes"),
    ],
)
def test_a_bug_in_a_writer_is_not_called_a_full_disk(error, tmp_path):
    def bug(folder):
        raise error

    with pytest.raises(type(error)) as caught:
        save_checkpoint(tmp_path, 2, [bug])
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


FULL = """
import resource, signal, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from swift.checkpoint import save_checkpoint
from swift.core.errors import CheckpointError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
big, words = torch.zeros(100_000), Tokenizer(models.BPE({str(i): i for i in range(5000)}, []))
writers = {
    "safetensors": lambda folder: save_file({"a": big}, folder / "a.safetensors"),
    "torch": lambda folder: torch.save({"a": big}, folder / "a.pt"),
    "tokenizers": lambda folder: words.save(str(folder / "tokenizer.json")),
    "python": lambda folder: (folder / "a").write_text("x" * 100_000),
}
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
for name, write in writers.items():
    try:
        save_checkpoint(Path(sys.argv[1]), 1, [write])
    except CheckpointError as error:
        assert "could not write" in error.message, error
        print(name)
"""


def test_a_refused_write_is_recognised_whichever_library_writes(tmp_path):
    """A file-size limit refuses as a full disk does; each library raises something else then."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["safetensors", "torch", "tokenizers", "python"]
    assert list(tmp_path.iterdir()) == []


def test_the_same_step_again_replaces_it(tmp_path):
    put(tmp_path, 1, "old")
    put(tmp_path, 1, "new")
    assert (tmp_path / "checkpoint-1/file").read_text() == "new"
    verify(tmp_path / "checkpoint-1")


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [(None, None, [1, 2, 3, 4]), (2, None, [3, 4]), (2, 1, [1, 4]), (1, 2, [2, 4]), (1, 4, [4]), (9, 1, [1, 2, 3, 4])],
)
def test_retention(tmp_path, keep, best, left):
    for step in (1, 2, 3, 4):
        put(tmp_path, step)
    prune(tmp_path, keep, newest=4, best=best)
    assert [c.step for c in list_checkpoints(tmp_path)] == left


@pytest.mark.parametrize(("keep", "best", "left"), [(1, None, [4]), (2, None, [2, 4]), (2, 900, [4, 900]), (1, 7, [4])])
def test_retention_goes_by_age_and_keeps_the_one_just_saved(tmp_path, keep, best, left):
    """A folder may hold higher steps of an earlier run; the best step may never have been saved."""
    for age, step in enumerate((4, 2, 900, 1000)):
        put(tmp_path, step)
        os.utime(tmp_path / f"checkpoint-{step}/complete.json", (1000 - age, 1000 - age))
    removed = prune(tmp_path, keep, newest=4, best=best)
    assert [c.step for c in list_checkpoints(tmp_path)] == left
    assert {path.name for path in removed} == {f"checkpoint-{step}" for step in {4, 2, 900, 1000} - set(left)}


def test_checkpoints_after_the_resumed_one_are_set_aside_whole(tmp_path):
    for text in ("first", "second"):
        for step in (2, 4, 6):
            put(tmp_path, step, text)
        link(tmp_path, "last", tmp_path / "checkpoint-6")
        link(tmp_path, "best", tmp_path / "checkpoint-2")
        moved = set_aside(tmp_path, 2)
        assert [c.step for c in list_checkpoints(tmp_path)] == [2]
        assert find_checkpoint("latest", tmp_path).step == 2
        assert [(path / "file").read_text() for path in moved] == [text, text]
        for path in moved:
            verify(path)
        assert not (tmp_path / "last").is_symlink()
        assert (tmp_path / "best").resolve() == tmp_path / "checkpoint-2"
    kept = sorted(path.name for path in (tmp_path / "superseded").iterdir())
    assert kept == ["checkpoint-4", "checkpoint-4.2", "checkpoint-6", "checkpoint-6.2"]
    assert set_aside(tmp_path, 2) == []


def test_clear_removes_checkpoints_and_leftovers_and_nothing_else(tmp_path):
    for step in (2, 4):
        put(tmp_path, step)
    set_aside(tmp_path, 2)
    link(tmp_path, "last", tmp_path / "checkpoint-2")
    for name in ("checkpoint-9", ".checkpoint-5.writing", ".checkpoint-1.removing", "runs", "checkpoint-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-10").symlink_to(tmp_path / "runs")  # not made by us: whatever it is, it isn't followed
    (tmp_path / "logging.jsonl").write_text("x")
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-10",
        "checkpoint-x",
        "logging.jsonl",
        "runs",
    ]
    clear(tmp_path / "missing")


def test_latest_looks_into_the_versions_of_an_output_folder(tmp_path):
    put(tmp_path / "v0-a", 50)
    time.sleep(0.02)
    put(tmp_path / "v1-b", 10)
    assert find_checkpoint("latest", tmp_path).path == tmp_path / "v1-b/checkpoint-10"
    assert find_checkpoint(str(tmp_path / "v0-a"), tmp_path).step == 50


def test_no_checkpoint_says_where_it_looked(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint") as caught:
        find_checkpoint("latest", tmp_path / "nothing")
    assert str(tmp_path / "nothing") in caught.value.where
    put(tmp_path, 3)
    with pytest.raises(CheckpointError, match="no such checkpoint") as caught:
        find_checkpoint(str(tmp_path / "checkpoint-4"), tmp_path)
    assert "checkpoint-3" in caught.value.fix


def test_tensors_survive_bit_for_bit(tmp_path):
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(4, 3).T,
        "c": torch.tensor([1, 2]),
        "d": torch.randn(2).bfloat16(),
    }
    save_tensors(tmp_path / "t.safetensors", tensors)
    loaded = load_tensors(tmp_path / "t.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_state_survives_and_a_broken_one_is_named(tmp_path):
    state = RunState(step=3, best_metric=0.1 + 0.2, window={"loss": [1 / 3, 7.0]})
    (tmp_path / "trainer_state.json").write_text(state.to_json())
    assert RunState.read(tmp_path) == state
    (tmp_path / "trainer_state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"trainer_state\.json"):
        RunState.read(tmp_path)


WRITER = """
import sys
from pathlib import Path
from swift.checkpoint import list_checkpoints, prune, save_checkpoint
run = Path(sys.argv[1])
step = max((c.step for c in list_checkpoints(run)), default=0)
while True:
    step += 1
    text = str(step) * 1000
    save_checkpoint(run, step, [lambda f: [(f / f"file{i}").write_text(text) for i in range(20)]])
    prune(run, 2, newest=step, best=None)
    print(step, flush=True)
"""


def test_kills_at_any_moment_lose_no_acknowledged_checkpoint(tmp_path):
    """kill -9 at varied moments: what was acknowledged is there, whole, and holds one step's data only."""
    acknowledged = 0
    for attempt in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env={**os.environ}
        )
        first = process.stdout.readline()
        time.sleep(0.003 * attempt + 0.001 * (attempt % 3))
        process.send_signal(signal.SIGKILL)
        lines = [first, *process.stdout.read().splitlines()]
        process.wait()
        acknowledged = max([acknowledged, *(int(line) for line in lines if line.strip())])
        newest = find_checkpoint("latest", tmp_path)
        assert newest.step >= acknowledged
        for checkpoint in list_checkpoints(tmp_path):
            verify(checkpoint.path)
            texts = {path.read_text() for path in checkpoint.path.glob("file*")}
            assert texts == {str(checkpoint.step) * 1000}


KILLER = """
import os, shutil, sys
from pathlib import Path
import swift.checkpoint.store as store

root, with_old = Path(sys.argv[1]), sys.argv[2] == "again"

def save(run, text):
    writers = [lambda folder, i=i: (folder / f"file{i}").write_text(text) for i in range(3)]
    store.save_checkpoint(run, 1, writers)

def arm(moment):
    left = [moment]
    def count():
        if not left[0]:
            os.kill(os.getpid(), 9)
        left[0] -= 1
    def before(original):
        def wrapped(*args, **kwargs):
            count()
            return original(*args, **kwargs)
        return wrapped
    remove = shutil.rmtree
    def remove_in_steps(path, *args, **kwargs):
        for file in list(Path(path).glob("*")):
            count()
            file.unlink()
        count()
        remove(path, *args, **kwargs)
    store.shutil.rmtree = remove_in_steps
    for owner, name in ((Path, "rename"), (Path, "write_text"), (store, "fsync_tree"), (store, "fsync_dir")):
        setattr(owner, name, before(getattr(owner, name)))

moment, code = 0, 9
while code:
    run = root / str(moment)
    if with_old:
        save(run, "old")
    child = os.fork()
    if not child:
        arm(moment)
        save(run, "new")
        os._exit(0)
    code = os.waitpid(child, 0)[1]
    moment += 1
"""


@pytest.mark.parametrize("how", ["again", "first"])
def test_kills_at_every_point_of_a_save_leave_a_whole_checkpoint(how, tmp_path):
    """The same step saved again: the old or the new one is there. A first save: nothing, or the new one once whole."""
    subprocess.run([sys.executable, "-c", KILLER, str(tmp_path), how], check=True, env={**os.environ})
    runs = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(runs) > (12 if how == "again" else 8)
    seen = []
    for run in runs:
        try:
            found = find_checkpoint(str(run / "checkpoint-1") if len(seen) % 2 else "latest", run)
        except CheckpointError:
            seen.append("nothing")
        else:
            verify(found.path)
            (text,) = {path.read_text() for path in found.path.glob("file*")}
            seen.append(text)
        put(run, 2)  # goes on, and clears up
        assert not list(run.glob(".checkpoint-*"))
        assert [c.step for c in list_checkpoints(run)] == ([2] if seen[-1] == "nothing" else [1, 2])
    before = "old" if how == "again" else "nothing"
    first_new = seen.index("new")
    assert seen == [before] * first_new + ["new"] * (len(seen) - first_new)
    assert first_new <= len(seen) - 4  # a folder that is whole counts before it has its name


def test_the_next_save_gives_a_whole_leftover_its_name_too(tmp_path):
    put(tmp_path, 4)
    (tmp_path / "checkpoint-4").rename(tmp_path / ".checkpoint-4.removing")
    put(tmp_path, 2)
    assert [c.step for c in list_checkpoints(tmp_path)] == [2, 4]


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path, monkeypatch):
    put(tmp_path, 1, "old")
    rename = type(tmp_path).rename

    def fail(path, target):
        if path.name.endswith(".writing"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", fail)
    with pytest.raises(CheckpointError, match="Input/output error"):
        put(tmp_path, 1, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert (tmp_path / "checkpoint-1/file").read_text() == "old"
