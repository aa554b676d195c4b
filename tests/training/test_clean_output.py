"""What a run of several processes prints is ours: libraries do not warn about their own calls, and stderr is empty."""

import json
import subprocess

import pytest
from runs import BASE, command, environment

LAYOUTS = {
    "copies": {},
    "copies, compressed": {"grad_compression": json.dumps({"intra": "bf16", "inter": "topk", "node_size": 1})},
    "fsdp": {"fsdp": "fsdp2"},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "sequence": {"sequence_parallel_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_library_warns(layout, tiny_model_dir, chat_rows, write_rows, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", chat_rows(8))
    flags = {
        **BASE,
        "model": str(tiny_model_dir),
        "dataset": [str(data)],
        "output_dir": str(tmp_path / "out"),
        "nproc_per_node": 2,
        "max_steps": 2,
        "save_steps": 2,
        **LAYOUTS[layout],
    }
    done = subprocess.run(command(flags), env=environment(), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (done.stdout + done.stderr).splitlines()
    assert not [line for line in lines if "Warning" in line or "deprecated" in line or "site-packages" in line]
    assert not done.stderr.strip(), done.stderr
