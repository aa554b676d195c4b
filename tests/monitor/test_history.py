"""logging.jsonl: strict JSON, flushed per line, continuous over a resume."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from swift.monitor.history import History, encode_line, read_history


def test_a_line_is_strict_json_and_says_which_values_were_not_finite():
    line = encode_line({"step": 3, "loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "ok": np.float32(0.5)})
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record == {
        "step": 3,
        "loss": None,
        "grad_norm": None,
        "low": None,
        "ok": 0.5,
        "nonfinite": {"loss": "nan", "grad_norm": "inf", "low": "-inf"},
    }


def test_each_line_is_on_disk_as_soon_as_it_is_written(tmp_path: Path):
    script = (
        "import os, sys; from pathlib import Path; from swift.monitor.history import History\n"
        "h = History(Path(sys.argv[1])); h.write({'step': 1, 'loss': 2.0}); os._exit(9)  # no interpreter shutdown\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert read_history(tmp_path) == [{"step": 1, "loss": 2.0}]


def test_resume_cuts_the_lines_after_the_checkpoint_and_the_torn_one(tmp_path: Path):
    history = History(tmp_path)
    for step in range(1, 8):
        history.write({"step": step, "loss": 1.0 / step if step != 2 else math.nan})
    history.close()
    untouched = history.path.read_text().splitlines()[:4]
    with history.path.open("a") as file:
        file.write('{"step": 8, "lo')

    resumed = History(tmp_path)
    resumed.resume_at(4)
    resumed.write({"step": 5, "loss": 0.125})
    resumed.close()

    lines = history.path.read_text().splitlines()
    assert lines[:4] == untouched  # the NaN marker of step 2 included
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert resumed.series("loss") == ([1, 3, 4, 5], [1.0, 1 / 3, 0.25, 0.125])


def test_resume_into_another_folder_carries_the_history_over(tmp_path: Path):
    old, new = tmp_path / "old", tmp_path / "new"
    history = History(old)
    history.write({"step": 1, "loss": 1.0})
    history.write({"step": 2, "loss": 0.5})
    history.close()
    resumed = History(new)
    resumed.resume_at(1, previous_run=old)
    assert read_history(new) == [{"step": 1, "loss": 1.0}]
    assert len(read_history(old)) == 2


def test_a_new_run_does_not_continue_an_old_file(tmp_path: Path):
    for loss in (1.0, 2.0):
        history = History(tmp_path)
        history.write({"step": 1, "loss": loss})
        history.close()
    assert read_history(tmp_path) == [{"step": 1, "loss": 2.0}]
