"""Encoders such as BERT, whose batches are padded and whose texts end in a separator: trained, and answering alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import make_tokenizer
from task_rows import TASKS, task_rows
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForMaskedLM

from swift.commands.infer import infer
from swift.commands.sft import sft
from swift.models.kinds import read_task


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT with a tokenizer that has no eos and no chat template."""
    folder = tmp_path_factory.mktemp("bert")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    tokenizer.eos_token = None
    ends = [("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=256, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "tuner", "pooling"), [("single", "full", "cls"), ("spans", "lora", None), ("cosine", "full", "mean")]
)
def test_encoders(name: str, tuner: str, pooling: str | None, bert: Path, write_rows: Any, tmp_path: Path) -> None:
    train, val = (write_rows(tmp_path / f"{part}.jsonl", task_rows(name, 12, part)) for part in (0, 1))
    result = sft(
        model=str(bert), dataset=[str(train)], val_dataset=[str(val)], **TASKS[name], tuner_type=tuner,
        output_dir=str(tmp_path / "run"), add_version=False, max_steps=4, learning_rate=1e-3, max_length=64,
        report_to=["none"], torch_dtype="float32", per_device_train_batch_size=4,
    )  # fmt: skip
    assert result.last_checkpoint is not None
    task = read_task(result.last_checkpoint)
    assert task is not None and task.pooling == pooling
    where = {"model": str(result.last_checkpoint)} if tuner == "full" else {"adapters": [str(result.last_checkpoint)]}
    lines = infer(val_dataset=[str(val)], result_path=str(tmp_path / "r.jsonl"), device="cpu", **where)
    assert [line["status"] for line in lines] == ["ok"] * 12
    found = json.loads((tmp_path / "r.jsonl.metrics.json").read_text())
    assert found
    for measure, value in found.items():
        assert value == pytest.approx(result.metrics[f"eval_{measure}"], rel=2e-6, abs=1e-6), measure
