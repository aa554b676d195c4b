"""Axolotl's names -> ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift.config.conversion import Conversion, by_reason, names_in, take_sharding

TOOL = "Axolotl"

_SAME = {
    "base_model": "model", "revision_of_model": "model_revision", "trust_remote_code": "trust_remote_code",
    "lora_r": "lora_rank", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "peft_use_dora": "use_dora",
    "peft_use_rslora": "use_rslora", "peft_init_lora_weights": "init_weights", "loraplus_lr_ratio": "lorap_lr_ratio",
    "lora_modules_to_save": "modules_to_save", "lora_target_parameters": "target_parameters",
    "sequence_len": "max_length", "sample_packing": "packing", "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size", "num_epochs": "num_train_epochs",
    "val_set_size": "split_dataset_ratio",
    "lr_scheduler": "lr_scheduler_type", "early_stopping_patience": "early_stop_interval",
    "dataset_processes": "dataset_num_proc", "dataset_num_proc": "dataset_num_proc", "tokens": "new_special_tokens",
    "shuffle_merged_datasets": "dataset_shuffle", "default_system_message": "system",
    "context_parallel_size": "sequence_parallel_size", "sequence_parallel_degree": "sequence_parallel_size",
    "tensor_parallel_size": "tensor_parallel_size", "expert_parallel_size": "expert_parallel_size",
    "dp_shard_size": "dp_shard_size", "dp_replicate_size": "dp_replicate_size",
    "cosine_min_lr_ratio": "min_lr_ratio", "streaming": "streaming",
    "dataloader_num_workers": "dataloader_num_workers", "dataloader_prefetch_factor": "dataloader_prefetch_factor",
}  # fmt: skip

_SATISFIED = by_reason(
    {
        "found by itself": "tokenizer_type model_type is_falcon_derived_model is_llama_derived_model "
        "is_mistral_derived_model is_qwen_derived_model lora_fan_in_fan_out",
        "always so": "tokenizer_use_fast save_safetensors low_cpu_mem_usage remove_unused_columns include_tkps strict",
        "not needed": "dataset_prepared_path gradient_checkpointing_kwargs local_rank skip_prepare_dataset lora_on_cpu "
        "tokenizer_legacy",
        "batches have no padding": "pad_to_sequence_len eval_sample_packing",
        "packing is best-fit": "multipack_* sample_packing_*",
        "the fastest attention that is there is chosen": "flash_attention sdp_attention flash_attn_* "
        "xformers_attention flex_attention",
        "the loss already works without full logits": "liger_* cut_cross_entropy chunked_cross_entropy",
        "the LoRA path saves memory already": "lora_mlp_kernel lora_qkv_kernel lora_o_kernel",
        "batches are small": "dataloader_pin_memory",
        "evaluation has the precision of training": "bf16_full_eval",
        "TensorBoard files are always written": "use_tensorboard",
    }
)

_LOST = by_reason(
    {
        "the model is loaded unquantized: it needs more memory": "load_in_4bit load_in_8bit gptq* "
        "bnb_config_kwargs qat",
        "chosen by the program": "ddp_*",
        "TensorBoard files are written": "wandb_* use_wandb mlflow_* use_mlflow comet_* use_comet",
        "upload the folder yourself": "hub_* push_dataset_to_hub",
        "plug-ins are being built": "plugins",
        "reinforcement learning is being built": "trl process_reward_model",
        "its method doesn't read it": "rl_beta kto_* orpo_* dpo_* simpo_* cpo_* rpo_alpha",
        "the tokenizer's own are kept; new ones: new_special_tokens": "special_tokens",
        "not built": "relora* lisa_* curriculum_sampling torchdistx_path max_memory gpu_memory_limit do_bench_eval "
        "optim_args optim_target_modules s2_attention",
        "give eval_steps": "evals_per_epoch",
        "give save_steps": "saves_per_epoch",
        "warm-up is linear": "lr_quadratic_warmup",
        "the model is placed on this process's device": "device_map",
        "adapters run on peft": "unsloth_*",
        "put it in a .jinja file and give it as template": "chat_template_jinja",
        "put it into the model's folder": "tokenizer_config base_model_config overrides_of_model_*",
        "choose it yourself": "auto_find_batch_size",
        "eval_loss, eval_perplexity and eval_token_accuracy are measured": "eval_causal_lm_metrics",
        "`swift infer --val_dataset` writes answers": "eval_table_size",
        "NaN and Inf stop the run": "loss_watchdog_*",
        "use gradient_checkpointing": "activation_offloading",
    }
)

METHODS = ("dpo", "ipo", "kto", "orpo", "simpo")
_PREFERENCE = {
    "dpo": {
        "rl_beta": "beta", "rpo_alpha": "rpo_alpha", "dpo_label_smoothing": "label_smoothing",
        "dpo_use_weighting": "use_weighting", "dpo_loss_type": "loss_type", "dpo_loss_weights": "loss_weights",
        "precompute_ref_log_probs": "precompute_ref_log_probs",
    },
    "ipo": {"rl_beta": "beta", "precompute_ref_log_probs": "precompute_ref_log_probs"},
    "kto": {
        "rl_beta": "beta", "kto_desirable_weight": "desirable_weight", "kto_undesirable_weight": "undesirable_weight",
    },
    "orpo": {"orpo_alpha": "beta", "rl_beta": "beta"},
    "simpo": {"rl_beta": "beta", "simpo_gamma": "simpo_gamma", "cpo_alpha": "cpo_alpha"},
    "rm": {"center_rewards_coefficient": "center_rewards_coefficient"},
}  # fmt: skip
_SCHEDULES = {"cosine_with_min_lr": "cosine_with_min_lr", "warmup_stable_decay": "wsd"}


def convert_axolotl(data: dict[str, Any], out: Conversion) -> None:
    """Convert an Axolotl file."""
    data = {key: value for key, value in data.items() if value is not None}
    adapter = data.pop("adapter", None) or "full"
    if adapter == "qlora":
        data.setdefault("load_in_4bit", True)
        adapter = "lora"
    out.set("tuner_type", adapter, key="adapter")
    _tuner(data, out)
    _preference(data, out)
    _datasets(data, out)
    _schedule(data, out)
    _precision(data, out)
    template = data.pop("chat_template", None)
    if template == "chatml":
        out.set("template", "chatml", key="chat_template")
    elif template not in (None, "tokenizer_default", "jinja"):
        out.ignore("chat_template", f"the tokenizer's own chat template is used, not {template}")
    if data.pop("train_on_inputs", False):
        out.set("loss_scale", "all", key="train_on_inputs")
    if "excess_length_strategy" in data:
        names = {"drop": "delete", "truncate": "right", "raise": "raise"}
        value = data.pop("excess_length_strategy")
        out.set("truncation_strategy", names.get(value, value), key="excess_length_strategy")
    if data.pop("auto_resume_from_checkpoints", False):
        out.set("resume_from_checkpoint", "latest", key="auto_resume_from_checkpoints")
    if "lora_model_dir" in data:
        out.set("adapters", names_in(data.pop("lora_model_dir")), key="lora_model_dir")
    if data.get("dp_shard_size", 1) not in (1, -1) and not data.get("deepspeed"):
        data.setdefault("fsdp_version", 2)
    take_sharding(data, out)
    out.take(data, _SAME)
    out.take_satisfied(data, _SATISFIED)
    out.take_lost(data, _LOST)
    out.take_rest(data)
    _defaults(out, adapter)


def _preference(data: dict[str, Any], out: Conversion) -> None:
    """Its `rl` is our method; what TRL takes by default is written out where we take something else."""
    method = data.pop("rl", None)
    if out.command != "rlhf":
        if method is not None:
            out.lose("rl", method, "reinforcement learning is being built")
        return
    if data.pop("reward_model", False):
        method = "rm"
    out.set("rlhf_type", "dpo" if method == "ipo" else method, key="rl")
    if method == "ipo":
        out.set("loss_type", ["ipo"], key="rl")
    out.take(data, _PREFERENCE.get(str(method), {}))
    if method == "simpo":
        out.default("beta", 0.1, TOOL)
        out.default("simpo_gamma", 0.5, TOOL)
        out.default("cpo_alpha", 1.0, TOOL)


def _tuner(data: dict[str, Any], out: Conversion) -> None:
    linear = data.pop("lora_target_linear", False)
    targets = data.pop("lora_target_modules", None)
    if linear:
        out.set("target_modules", ["all-linear"], key="lora_target_linear")
    elif isinstance(targets, str):
        out.set("target_regex", targets, key="lora_target_modules")
    elif targets:
        out.set("target_modules", targets, key="lora_target_modules")
    unfrozen = data.pop("unfrozen_parameters", None)
    if unfrozen:
        out.set("freeze_parameters_ratio", 1.0, key="unfrozen_parameters")
        out.set("trainable_parameters_regex", "|".join(f"({item})" for item in unfrozen), key="unfrozen_parameters")


def _schedule(data: dict[str, Any], out: Conversion) -> None:
    """Optimizer and schedule names; saving and evaluating counted per epoch."""
    optimizer = data.pop("optimizer", None)
    if optimizer is not None:
        out.set("optim", optimizer, key="optimizer")
    if "lr_scheduler" in data:
        value = data.pop("lr_scheduler")
        out.set("lr_scheduler_type", _SCHEDULES.get(value, value), key="lr_scheduler")
    for key, strategy in (("saves_per_epoch", "save_strategy"), ("evals_per_epoch", "eval_strategy")):
        if data.get(key) == 1:
            data.pop(key)
            out.set(strategy, "epoch", key=key)
    for key in ("save_steps", "eval_steps", "warmup_steps"):
        value = data.get(key)
        if isinstance(value, float) and 0 < value < 1:
            out.lose(key, data.pop(key), "a share of the run; give a number of steps")


def _precision(data: dict[str, Any], out: Conversion) -> None:
    for key, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16"), ("float16", "float16")):
        value = data.pop(key, None)
        if value == "auto":
            out.ignore(key, "the precision follows the device")
        elif value is True or value == "full":
            out.set("torch_dtype", dtype, key=key)
    if data.pop("tf32", False):
        out.ignore("tf32", "fp32 stays fp32")


def _datasets(data: dict[str, Any], out: Conversion) -> None:
    columns: dict[str, str] = {}
    pretraining = data.pop("pretraining_dataset", None)
    if isinstance(pretraining, (str, dict)):
        pretraining = [pretraining]
    for key, setting in (("datasets", "dataset"), ("test_datasets", "val_dataset")):
        entries = [*(data.pop(key, None) or []), *((pretraining or []) if key == "datasets" else [])]
        files: list[str] = []
        for entry in entries:
            files += _dataset_files({"path": entry} if isinstance(entry, str) else entry, out, columns)
        if files:
            out.set(setting, files, key=key)
    if columns:
        out.set("columns", columns)


def _dataset_files(entry: dict[str, Any], out: Conversion, columns: dict[str, str]) -> list[str]:
    """The files of one dataset, or its id on the hub."""
    path = str(entry.get("path", ""))
    kind = entry.get("type", "chat_template")
    if isinstance(kind, dict):  # its own prompt written out
        out.lose(f"dataset {path}: type", kind, "rename the columns to instruction, input, output with columns")
        kind = "alpaca"
    shape = str(kind).partition(".")[0]
    if out.command != "rlhf" and shape not in (
        "chat_template",
        "alpaca",
        "sharegpt",
        "completion",
        "input_output",
        "alpaca_chat",
        "pretrain",
    ):
        out.lose(
            f"dataset {path}: type", kind, "the rows' shape is told from their keys; check with `swift data check`"
        )
    for key, name in (("field_messages", "messages"), ("field", "text"), ("field_system", "system"),
                      ("field_instruction", "instruction"), ("field_input", "input"), ("field_output", "output"),
                      ("field_tools", "tools"), ("field_chosen", "chosen"),
                      ("field_rejected", "rejected")):  # fmt: skip
        if entry.get(key) and entry[key] not in (name, "conversations"):
            columns[str(entry[key])] = name
    for key in ("message_property_mappings", "message_field_role", "message_field_content"):
        value = entry.get(key)
        words = set(value.values()) if isinstance(value, dict) else {value} if value else set()
        if words - {"role", "content", "from", "value"}:
            out.lose(f"dataset {path}: {key}", value, "rename the keys in the file to role and content")
    trained = entry.get("roles_to_train")
    if trained and set(trained) - {"assistant", "gpt"}:
        out.lose(f"dataset {path}: roles_to_train", trained, 'mark messages with "loss": true in the file')
    data_files = [entry["data_files"]] if isinstance(entry.get("data_files"), str) else entry.get("data_files")
    if data_files:
        return [str(file if Path(file).exists() else Path(path) / file) for file in data_files]
    here = Path(path).exists() or (out.base / path).exists() or entry.get("ds_type") or path.startswith((".", "/"))
    if here and entry.get("split") not in (None, "train"):
        out.lose(f"dataset {path}: split", entry["split"], "give the files of that split")
    if not here and "://" not in path:
        return [_hub_id(entry, path)]
    return [path]


def _hub_id(entry: dict[str, Any], path: str) -> str:
    """`hf::owner/name@revision:subset:split`, as far as they are given."""
    revision = f"@{entry['revision']}" if entry.get("revision") else ""
    split = f":{entry['split']}" if entry.get("split") else ""
    subset = f":{entry.get('name') or ''}" if entry.get("name") or split else ""
    return f"hf::{path}{revision}{subset}{split}"


def _defaults(out: Conversion, adapter: str) -> None:
    for name, value in {
        "num_train_epochs": 1.0, "max_length": 512, "weight_decay": 0.0, "adam_beta2": 0.999,
        "gradient_accumulation_steps": 1, "strict": False, "add_version": False, "output_dir": "./model-out",
        **({"lora_dropout": 0.0} if adapter != "full" else {}),
        **({} if {"warmup_steps", "warmup_ratio"} & set(out.values) else {"warmup_ratio": 0.03}),
    }.items():  # fmt: skip
        out.default(name, value, TOOL)
