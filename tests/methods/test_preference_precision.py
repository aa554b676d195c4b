"""At step 1 the model is its reference, in whichever precision it computes: the loss is log 2 to the last bit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from preference_rows import pair_rows

from swift.commands.rlhf import rlhf

WAYS = [
    ("lora", {"reference": "adapter_off"}),
    ("lora", {"reference": "precompute"}),
    ("full", {"reference": "precompute", "gradient_checkpointing": True}),
    ("full", {"reference": "copy"}),
    pytest.param("lora", {"reference": "copy"}, marks=pytest.mark.slow),
    pytest.param("full", {"reference": "precompute", "share_prompts": "false"}, marks=pytest.mark.slow),
    pytest.param("lora", {"reference": "precompute", "share_prompts": "false"}, marks=pytest.mark.slow),
    pytest.param("lora", {"reference": "adapter_off", "gradient_checkpointing": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("tuner", "flags"), WAYS)
def test_the_first_loss_is_that_of_no_difference(
    dtype: str,
    tuner: str,
    flags: dict[str, Any],
    tiny_model_dir: Path,
    write_rows: Callable[..., Path],
    tmp_path: Path,
) -> None:
    rlhf(
        model=str(tiny_model_dir),
        dataset=[str(write_rows(tmp_path / "pairs.jsonl", pair_rows(9)))],
        tuner_type=tuner,
        torch_dtype=dtype,
        max_steps=2,
        max_length=128,
        learning_rate=1e-2,
        logging_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_strategy="no",
        output_dir=str(tmp_path / "run"),
        add_version=False,
        report_to=["none"],
        **flags,
    )
    lines = map(json.loads, (tmp_path / "run" / "logging.jsonl").read_text().splitlines())
    first, second = (line for line in lines if "grad_norm" in line)
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-8)  # fp32's nearest to it
    assert first["rewards/chosen"] == first["rewards/rejected"] == 0.0
    assert second["rewards/margins"] != 0.0
