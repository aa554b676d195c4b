"""Killed, interrupted and divided runs: the output is that of an uninterrupted one, and done tasks stay done."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from swift.core.errors import SwiftError, UsageError
from swift.data.engine.ranks import rank_and_size

SWIFT = [sys.executable, "-m", "swift.cli", "data", "run"]


def files_of(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("part-*"))}


def start(recipe: dict, path: Path, *flags: str, **options) -> subprocess.Popen:
    path.write_text(json.dumps(recipe))
    return subprocess.Popen(
        [*SWIFT, str(path), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def wait_for(condition, process: subprocess.Popen, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def tasks_in(log: Path) -> Counter[str]:
    """How often each file was gone through, told by the first row of its first batch."""
    lines = [line for path in log.glob("[0-9]*") for line in path.read_text().splitlines()]
    return Counter(line.rpartition("/")[2] for line in lines if line.endswith(":1"))


@pytest.fixture
def log(tmp_path: Path, monkeypatch) -> Path:
    """The folder in which toy_slow tells what it does."""
    folder = tmp_path / "log"
    folder.mkdir()
    monkeypatch.setenv("TOY_LOG", str(folder))
    return folder


@pytest.mark.parametrize("num_proc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_kill_9_in_the_middle_loses_only_what_was_running(run, recipe_of, tmp_path, log, num_proc):
    steps = [{"toy_slow": {"seconds": 0.3}}, "toy_length", "toy_dedup"]
    recipe = recipe_of(steps, executor={"num_proc": num_proc})
    process = start(recipe, tmp_path / "r.json")
    done = tmp_path / "out/.work/00-read"
    wait_for(lambda: any(done.glob("*.done")) and sum(tasks_in(log).values()) > 1, process)
    process.kill()
    process.wait()
    finished = {path.stem for path in done.glob("*.done")}
    assert 0 < len(finished) < 4 and not (tmp_path / "out/_manifest.json").exists()
    before = tasks_in(log)
    wait_until_gone(pids_in(log))
    result = run(recipe)
    assert result.tasks_done_before >= len(finished)
    repeated = {name for name, count in (tasks_in(log) - before).items() if count}
    assert not repeated & {f"s{int(stem)}.jsonl:1" for stem in finished}
    steps[0] = {"toy_slow": {}}
    whole = run(recipe_of(steps, folder="whole"))
    assert files_of(result.output) == files_of(whole.output)


def pids_in(log: Path) -> set[int]:
    return {int(path.name) for path in log.glob("[0-9]*")}


def wait_until_gone(pids: set[int]) -> None:
    """Workers end with a parent that was killed."""
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() and not zombie(pid) for pid in pids):
        assert time.monotonic() < end, "a worker outlived its parent"
        time.sleep(0.05)


def zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
def test_kills_at_any_moment(run, recipe_of, tmp_path):
    """Killed again and again, a bit later each time, until it gets through."""
    recipe = recipe_of(["toy_length", "toy_dedup", "toy_upper"], output={"shard_bytes": "10KB"})
    whole = run(recipe_of(["toy_length", "toy_dedup", "toy_upper"], folder="whole", output={"shard_bytes": "10KB"}))
    kills = 0
    for attempt in range(200):
        process = start(recipe, tmp_path / "r.json")
        try:
            process.communicate(timeout=0.45 + 0.02 * attempt)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0
        break
    assert kills > 0 and (tmp_path / "out/_manifest.json").exists()
    assert files_of(tmp_path / "out") == files_of(whole.output)
    assert not (tmp_path / "out/.work").exists()


@pytest.mark.parametrize(
    ("num_proc", "number", "code"),
    [
        (1, signal.SIGINT, 130),
        (2, signal.SIGTERM, 143),
        pytest.param(1, signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(2, signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_a_request_to_stop_is_answered_with_the_way_on(recipe_of, run, tmp_path, log, number, code, num_proc):
    steps = [{"toy_slow": {"seconds": 0.3}}]
    recipe = recipe_of(steps, executor={"num_proc": num_proc})
    process = start(recipe, tmp_path / "r.json")
    wait_for(lambda: any(log.iterdir()), process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert f"swift data run {tmp_path}/r.json" in err and "Traceback" not in err
    assert not list((tmp_path / "out").rglob("*.tmp"))
    done = len(list((tmp_path / "out/.work/00-read").glob("*.done")))
    assert done < 4
    result = run(recipe)
    assert result.tasks_done_before == done and result.manifest["rows"] == 1000


def test_two_ranks_share_the_work(recipe_of, run, tmp_path, log):
    steps = [{"toy_slow": {}}, "toy_length", "toy_dedup", "toy_upper"]
    recipe = recipe_of(steps, output={"shard_bytes": "10KB"})
    processes = [start(recipe, tmp_path / "r.json", "--rank", str(rank), "--world_size", "2") for rank in (1, 0)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert str(tmp_path / "out") in out
    assert tasks_in(log) == Counter({f"s{n}.jsonl:1": 1 for n in range(4)})
    assert len(pids_in(log)) == 2
    whole = run(recipe_of(steps, folder="whole", output={"shard_bytes": "10KB"}))
    assert files_of(tmp_path / "out") == files_of(whole.output)


def test_a_rank_that_does_not_come_is_named(recipe_of, run):
    with pytest.raises(SwiftError) as caught:
        run(recipe_of(["toy_length"]), rank=0, world_size="2", rank_timeout_s=0.5)
    assert "rank 1 of 2 has not come" in caught.value.message and "--rank 1 --world_size 2" in caught.value.fix


def test_a_rank_that_fails_stops_the_others(recipe_of, run, tmp_path, rows_folder):
    (rows_folder / "s1.jsonl").write_text('{"text": "poison"}\n')
    recipe = recipe_of(["toy_fail"])
    process = start(recipe, tmp_path / "r.json", "--rank", "1", "--world_size", "2")
    with pytest.raises(SwiftError) as caught:
        run(recipe, rank=0, world_size="2", rank_timeout_s=60)
    assert "rank 1 on" in caught.value.message and "toy_fail failed" in caught.value.message
    assert process.wait(60) == 1


def test_a_second_run_into_the_same_folder_is_refused(recipe_of, run, tmp_path, log):
    recipe = recipe_of([{"toy_slow": {"seconds": 5}}])
    process = start(recipe, tmp_path / "r.json")
    wait_for(lambda: any(log.iterdir()), process)
    for restart in (False, True):
        with pytest.raises(SwiftError) as caught:
            run(recipe, restart=restart)
        assert f"another process ({process.pid} on" in caught.value.message
    assert (tmp_path / "out/.work").exists()
    process.kill()
    process.communicate()


def test_where_rank_and_size_come_from():
    assert rank_and_size(None, None, {"RANK": "3", "WORLD_SIZE": "8"}) == (0, 1)  # asked for nothing
    assert rank_and_size(None, "auto", {"RANK": "3", "WORLD_SIZE": "8"}) == (3, 8)
    assert rank_and_size(None, "auto", {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}) == (1, 4)
    assert rank_and_size(2, "4", {}) == (2, 4)
    for rank, size in ((None, "auto"), (1, None), (None, "2"), (2, "2"), (0, "many"), (-1, "2")):
        with pytest.raises(UsageError):
            rank_and_size(rank, size, {})


def test_workers_end_at_once_with_a_parent_that_was_killed(recipe_of, tmp_path, log):
    process = start(recipe_of([{"toy_slow": {"seconds": 120}}], executor={"num_proc": 2}), tmp_path / "r.json")
    wait_for(lambda: len(pids_in(log)) == 2, process)
    process.kill()
    process.wait()
    wait_until_gone(pids_in(log))


def test_a_rank_with_another_recipe_is_refused(recipe_of, run, monkeypatch, tmp_path, log):
    from swift.data.engine import run as module

    monkeypatch.setattr(module, "_SAME_PLAN_S", 0.5)
    process = start(recipe_of([{"toy_slow": {"seconds": 60}}]), tmp_path / "r.json", "--rank", "0", "--world_size", "2")
    wait_for(lambda: any(log.iterdir()), process)
    with pytest.raises(UsageError) as caught:
        run(recipe_of(["toy_length"]), rank=1, world_size="2")
    assert "rank 0 runs another recipe" in caught.value.message
    process.kill()
    process.wait()


def test_ranks_do_not_restart(recipe_of, run):
    with pytest.raises(UsageError) as caught:
        run(recipe_of([]), rank=0, world_size="2", restart=True)
    assert "remove the output folder" in caught.value.fix


def test_an_old_failure_of_a_rank_is_forgotten(recipe_of, run, tmp_path, rows_folder):
    """The rank that failed comes again after this one, which must not take the old failure for a new one."""
    old = tmp_path / "out/.work/ranks/1.failed"
    old.parent.mkdir(parents=True)
    old.write_text('{"host": "h", "message": "old"}')
    os.utime(old, (1e9, 1e9))
    recipe = recipe_of(["toy_length"])
    process = start(recipe, tmp_path / "r.json", "--rank", "1", "--world_size", "2")
    assert run(recipe, rank=0, world_size="2").manifest["rows"] == 800
    assert process.wait(60) == 0
