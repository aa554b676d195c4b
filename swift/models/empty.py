"""A model without numbers: its modules on the meta device, with the settings that `load_model` would apply.

It takes no memory, so a model larger than the machine can be wrapped, cut and sharded before `fill_model` reads what
is left to this process.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from swift.config.model import ModelConfig
from swift.core.errors import ModelError, UsageError
from swift.models.hub import weight_files
from swift.models.kinds import CAUSAL_LM, Task, make_empty, may_be_fresh, note_fresh, settle_task
from swift.models.loading import NEW_TOKEN_IDS, load_configuration, load_errors, load_tokenizer, usual_attention
from swift.models.quiet import quiet_transformers
from swift.models.stored import open_weights


def build_empty_model(
    path: Path | str,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    task: Task = CAUSAL_LM,
) -> PreTrainedModel:
    """The model of a folder on the meta device, in evaluation mode.

    Args:
        path: folder with config.json.
        config: `rope_scaling`, `max_model_len`, `new_special_tokens`, `model_type`, `trust_remote_code` are read.
        dtype: of the weights that it will get.
        attn_implementation: a name that transformers' attention interface knows; default: `usual_attention`.
        task: what the model is for; `fresh_parameters` names what a folder with weights lacks of its head.

    Raises:
        ModelError: an architecture that isn't known, or settings that don't fit it.
        UsageError: new tokens need more rows than the embeddings have.
    """
    path = Path(path)
    model_config = load_configuration(path, config)
    if getattr(model_config, "quantization_config", None) is not None:
        raise ModelError(
            f"the weights in {path} are quantized, and a model that is spread over processes needs plain ones",
            fix="train it without sharding, or start from the model that was quantized",
        )
    task = settle_task(model_config, task, path)
    with load_errors(path, "model"), quiet_transformers(), torch.device("meta"):
        model: Any = make_empty(
            model_config,
            task,
            dtype=dtype,
            attn_implementation=attn_implementation or usual_attention(model_config),
            trust_remote_code=config.trust_remote_code,
        )
    _keep_precision(model, dtype)
    if task.has_labels and weight_files(path):
        with open_weights(path, model) as weights:
            missing = set(model.state_dict()) - set(weights.tensors)
        note_fresh(model, [name for name in missing if may_be_fresh(model, name)])
    _read_generation_settings(model, path)
    model.name_or_path = model_config._name_or_path = str(path)
    if config.new_special_tokens:
        _require_rows(model, path, config)
    return model.eval()


def _keep_precision(model: Any, dtype: torch.dtype) -> None:
    """The parameters that an architecture wants in fp32 whatever the dtype, as `from_pretrained` keeps them."""
    wanted = set(model._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else set()
    wanted |= set(model._keep_in_fp32_modules or ()) if dtype == torch.float16 else set()
    if not wanted:
        return
    pattern = re.compile("|".join(entry.replace("*", ".*") for entry in wanted))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if pattern.search(name) and tensor.is_floating_point():
            tensor.data = tensor.data.float()


def _require_rows(model: PreTrainedModel, path: Path, config: ModelConfig) -> None:
    """Refuse to grow embeddings: the new rows are a mean over all rows, which no process reads."""
    table: Any = model.get_input_embeddings()
    tokenizer = load_tokenizer(path, config)
    rows, tokens = table.weight.shape[0], len(tokenizer)
    if new := getattr(tokenizer, NEW_TOKEN_IDS, []):
        setattr(model, NEW_TOKEN_IDS, sorted(new))
    if tokens > rows:
        raise UsageError(
            f"the new tokens need {tokens - rows} more rows than the model's embeddings have ({rows}), and a model "
            "that is spread over processes can't grow",
            where="--new_special_tokens",
            fix="train in one process, or start from a model that has rows for them",
        )


def _read_generation_settings(model: Any, path: Path) -> None:
    """What `from_pretrained` does beside the weights: generation_config.json belongs to the model."""
    from transformers import GenerationConfig

    if model.can_generate() and (path / "generation_config.json").is_file():
        with load_errors(path, "generation settings"), quiet_transformers():
            model.generation_config = GenerationConfig.from_pretrained(str(path), local_files_only=True)
