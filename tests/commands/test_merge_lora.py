"""`swift merge-lora` from the command line and from Python."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys

import pytest
import torch

from swift.commands.merge_lora import main, merge_lora
from swift.config import MergeLoraConfig, SftConfig, build_config, save_config
from swift.config.model import ModelConfig
from swift.config.tuner import TunerConfig
from swift.core.errors import UsageError
from swift.models.adapters import Swift
from swift.models.loading import load_model
from swift.models.tuners import apply_tuner


@pytest.fixture
def adapter(tiny_model_dir, tmp_path):
    """A checkpoint as training leaves it: adapter and settings."""
    model = load_model(tiny_model_dir, ModelConfig(), dtype=torch.float32)
    model = apply_tuner(model, TunerConfig(lora_dropout=0.0))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.02)
    folder = tmp_path / "run" / "checkpoint-7"
    Swift.save(model, folder)
    settings = build_config(SftConfig, {"model": str(tiny_model_dir), "dataset": ["x.jsonl"], "system": "Be brief."})
    save_config(settings, folder)
    return folder


def test_the_adapter_alone_is_enough(adapter, tiny_model_dir, caplog):
    logging.getLogger("swift").propagate = True
    try:
        assert main(MergeLoraConfig(model=ModelConfig(adapters=[str(adapter)]))) == 0
    finally:
        logging.getLogger("swift").propagate = False
    output = adapter.with_name("checkpoint-7-merged")
    said = caplog.text
    assert str(output) in said and "same first choice at 100.0%" in said and f"swift infer --model {output}" in said
    assert "Be brief." in (output / "swift_config.yaml").read_text()
    merged = load_model(output, ModelConfig(), dtype=torch.float32)
    unmerged = Swift.from_pretrained(load_model(tiny_model_dir, ModelConfig(), dtype=torch.float32), adapter)
    tokens = torch.arange(30)[None]
    torch.testing.assert_close(merged(tokens).logits, unmerged(tokens).logits, atol=1e-4, rtol=1e-3)


def test_from_python_with_keywords(adapter, tmp_path):
    report = merge_lora(adapters=[str(adapter)], output_dir=str(tmp_path / "out"), torch_dtype="bfloat16")
    assert report.output == tmp_path / "out" and report.dtype == "bfloat16"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_foreign_adapter_names_its_base(adapter, tiny_model_dir, tmp_path):
    shutil.copytree(adapter, tmp_path / "foreign", ignore=shutil.ignore_patterns("swift_config.yaml"))
    assert merge_lora(adapters=[str(tmp_path / "foreign")]).base == tiny_model_dir
    config = json.loads((tmp_path / "foreign" / "adapter_config.json").read_text())
    (tmp_path / "foreign" / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    with pytest.raises(UsageError, match="which model it belongs to"):
        merge_lora(adapters=[str(tmp_path / "foreign")])


def test_no_or_several_adapters(adapter):
    with pytest.raises(UsageError, match="needs an adapter"):
        merge_lora(MergeLoraConfig())
    with pytest.raises(UsageError, match="takes one adapter"):
        merge_lora(MergeLoraConfig(model=ModelConfig(model="smollm2", adapters=[str(adapter), str(adapter)])))


def test_the_command_line(adapter, tmp_path):
    command = [sys.executable, "-m", "swift.cli", "merge-lora", "--adapters", str(adapter)]
    done = subprocess.run([*command, "--output_dir", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len((done.stdout + done.stderr).splitlines()) <= 8
    assert (tmp_path / "out" / "model.safetensors").is_file()
    again = subprocess.run([*command, "--output_dir", str(tmp_path / "out")], capture_output=True, text=True)
    assert again.returncode == 2 and "--exist_ok true" in again.stderr and "Traceback" not in again.stderr
