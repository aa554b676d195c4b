"""Waiting for another process's work: as long as it shows signs of life, and not much longer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import on_two_ranks

from swift.core.errors import SwiftError
from swift.distributed.heartbeat import Heartbeat, Watch

BEATING = """
import sys, time
from pathlib import Path
from swift.distributed.heartbeat import Heartbeat
with Heartbeat(Path(sys.argv[1]), every_s=0.02) as heartbeat:
    heartbeat.say("43 % read")
    print("beats", flush=True)
    time.sleep(60)
"""

# rank 0 works for longer than any collective would wait, and dies in the second round
ROUNDS = """
from swift.distributed.heartbeat import Heartbeat, Watch
group = start_process_group("cpu", timeout=timedelta(seconds=4))
process_group._WATCH_EVERY_S = 0.2
pulse = here / "pulse"

def work():
    with Heartbeat(pulse, every_s=0.1):
        time.sleep(6)
    return "done"

seen = [group.from_main(work, watch=Watch(pulse, "rank 0 works", patience_s=2).check)]

def fail():
    with Heartbeat(pulse, every_s=0.1):
        raise SwiftError("bad row", where="rows.jsonl:3")

try:
    group.from_main(fail, watch=Watch(pulse, "rank 0 works", patience_s=2).check)
except SwiftError as error:
    seen.append(error.where)

def die():
    with Heartbeat(pulse, every_s=0.1) as heartbeat:
        heartbeat.say("43 % read")
        time.sleep(0.5)
        if rank == 0:
            print(json.dumps(seen), flush=True)
            os._exit(0)

try:
    group.from_main(die, watch=Watch(pulse, "rank 0 works", patience_s=2).check)
except SwiftError as error:
    print(json.dumps([*seen, str(error)]), flush=True)
    os._exit(0)
"""


def test_a_beat_says_who_and_how_far(tmp_path: Path) -> None:
    path = tmp_path / "new" / "pulse"
    with Heartbeat(path, every_s=0.01) as heartbeat:
        heartbeat.say("half")
        seen = set()
        while len(seen) < 3:
            beat = json.loads(path.read_text())
            seen.add(beat["beat"])
        while beat["words"] != "half":
            beat = json.loads(path.read_text())
        assert beat["pid"] == os.getpid()
    assert not path.exists() and not list(path.parent.iterdir())


def test_a_killed_process_is_missed_at_once(tmp_path: Path) -> None:
    path = tmp_path / "pulse"
    process = subprocess.Popen([sys.executable, "-c", BEATING, str(path)], stdout=subprocess.PIPE)
    watch = Watch(path, "rank 0 prepares the data", patience_s=1e9)
    try:
        assert process.stdout is not None and process.stdout.readline()
        for _ in range(5):
            watch.check()
        time.sleep(0.1)
        watch.check()
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(SwiftError, match=rf"process {process.pid} .* is gone .*43 % read"):
            for _ in range(3):
                watch.check()
    finally:
        process.kill()
        process.wait()


def test_on_another_machine_silence_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr("swift.distributed.heartbeat.time.monotonic", lambda: clock)
    path = tmp_path / "pulse"
    watch = Watch(path, "rank 0 works", patience_s=10)
    clock = 9.0
    watch.check()  # it has not begun
    for beat in range(3):
        path.write_text(json.dumps({"pid": 1, "host": "elsewhere", "beat": beat, "words": "w"}))
        watch.check()
        clock += 9.0
        watch.check()
    path.unlink()  # just finished, or a stale handle: still only silence
    clock += 2.0
    with pytest.raises(SwiftError, match="on elsewhere is gone"):
        watch.check()


def test_nobody_ever_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr("swift.distributed.heartbeat.time.monotonic", lambda: clock)
    watch = Watch(tmp_path / "pulse", "rank 0 works", patience_s=10)
    watch.check()
    clock = 10.5
    with pytest.raises(SwiftError, match="no sign of life"):
        watch.check()


@pytest.mark.slow
def test_two_ranks_wait_longer_than_a_collective_and_miss_the_dead(tmp_path: Path) -> None:
    seen = on_two_ranks(ROUNDS, tmp_path)
    assert seen[0] == ["done", "rows.jsonl:3"]
    assert seen[1][:2] == ["done", "rows.jsonl:3"]
    assert "is gone" in seen[1][2]
