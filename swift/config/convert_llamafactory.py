"""LLaMA-Factory's names -> ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swift.config.conversion import Conversion, by_reason, names_in, take_sharding

TOOL = "LLaMA-Factory"

_SAME = {
    "model_name_or_path": "model", "model_revision": "model_revision", "trust_remote_code": "trust_remote_code",
    "lora_rank": "lora_rank", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora",
    "use_dora": "use_dora", "loraplus_lr_ratio": "lorap_lr_ratio", "cutoff_len": "max_length",
    "preprocessing_num_workers": "dataset_num_proc", "default_system": "system", "enable_thinking": "enable_thinking",
    "use_dft_loss": "enable_dft_loss", "neftune_noise_alpha": "neftune_noise_alpha", "packing": "packing",
    "group_by_length": "group_by_length", "streaming": "streaming", "buffer_size": "shuffle_buffer_size",
    "dataloader_num_workers": "dataloader_num_workers",
    "max_new_tokens": "max_new_tokens", "temperature": "temperature",
    "top_p": "top_p", "top_k": "top_k", "repetition_penalty": "repetition_penalty", "num_beams": "num_beams",
    "infer_backend": "infer_backend", "export_dir": "output_dir",
}  # fmt: skip

_SATISFIED = by_reason(
    {
        "it follows from the command and the evaluation rows": "do_train do_eval",
        "rows are tokenised anew in every run": "overwrite_cache tokenized_path",
        "batches are small": "dataloader_pin_memory",
        "loss.png is always drawn": "plot_loss",
        "always so": "use_fast_tokenizer low_cpu_mem_usage include_num_input_tokens_seen save_safetensors "
        "remove_unused_columns print_param_status",
        "chosen by the program": "ddp_timeout ddp_find_unused_parameters use_cache",
        "the loss already works without full logits": "enable_liger_kernel",
        "master weights and the loss are fp32": "upcast_layernorm upcast_lmhead_output",
        "the tokenizer decides": "split_special_tokens",
        "the embedding grows with new_special_tokens": "resize_vocab",
        "weights are safetensors": "export_legacy_format",
        "not needed": "data_shared_file_system export_device",
        "eval_token_accuracy is always measured": "compute_accuracy",
    }
)

_RL = "reinforcement learning is being built"
_METHODS = ("dpo", "kto", "rm")
_LOST = by_reason(
    {
        "the model is loaded unquantized: it needs more memory": "quantization_bit quantization_method "
        "quantization_type double_quantization",
        "quantizing is being built": "export_quantization_*",
        "upload the folder yourself": "export_hub_model_id",
        "not built": "use_galore galore_* use_badam badam_* use_apollo apollo_* use_muon use_llama_pro use_adam_mini "
        "shift_attn mixture_of_depths",
        "give freeze_parameters_ratio and trainable_parameters instead": "freeze_trainable_* freeze_extra_modules",
        "the model's own template renders tools": "tool_format",
        "adapters run on peft": "use_unsloth*",
        "`swift infer --val_dataset` writes answers": "predict_with_generate do_predict",
        _RL: "ppo_* reward_model*",
        "the reference is held as the model is": "ref_model_quantization_bit",
        "it weighs the loss of the pairs": "pref_* kto_* dpo_* simpo_*",
        "models are tuned on text only so far": "image_* video_* freeze_vision_tower "
        "freeze_multi_modal_projector media_dir",
        "start one process per node with NNODES and NODE_RANK": "ray_*",
        "TensorBoard files are written": "swanlab_* use_swanlab",
        "give early_stop_interval: evaluations, not steps": "early_stopping_steps",
        'give the factor: {"rope_type": "yarn", "factor": 2.0}': "rope_scaling",
        "merge the old adapter first": "create_new_adapter",
        "runs are named by their folder": "run_name",
    }
)


def convert_llamafactory(data: dict[str, Any], out: Conversion) -> None:
    """Convert a train, inference or export file of LLaMA-Factory."""
    data = {key: value for key, value in data.items() if value is not None}
    stage = data.pop("stage", "sft")
    if stage not in ("sft", "pt", *_METHODS):
        out.lose("stage", stage, _RL)
    if out.command == "rlhf":
        _preference(data, out, stage)
    kind = data.pop("finetuning_type", "lora")
    if kind == "freeze":
        out.lose("finetuning_type", kind, "full tuning with freeze_parameters_ratio and trainable_parameters")
        kind = "full"
    if out.command in ("sft", "pt", "rlhf"):
        out.set("tuner_type", kind)
        _training(data, out, kind)
    else:
        for key in ("template", "cutoff_len"):
            if key in data:
                out.ignore(key, "taken from the checkpoint")
                data.pop(key)
    if "export_size" in data:
        out.set("max_shard_size", f"{data.pop('export_size')}GB", key="export_size")
    if "adapter_name_or_path" in data:
        out.set("adapters", names_in(data.pop("adapter_name_or_path")), key="adapter_name_or_path")
    dtype = data.pop("infer_dtype", "auto")
    if dtype != "auto":
        out.lose("infer_dtype", dtype, "give torch_dtype")
    take_sharding(data, out)
    out.take(data, _SAME)
    out.take_satisfied(data, _SATISFIED)
    out.take_lost(data, _LOST)
    out.take_rest(data)
    if out.command in ("sft", "pt", "rlhf"):
        _defaults(out, kind)


def _training(data: dict[str, Any], out: Conversion, kind: str) -> None:
    _datasets(data, out)
    _val_size(data, out)
    _mixing(data, out)
    if "lora_target" in data:
        target = names_in(data.pop("lora_target"))
        out.set("target_modules", ["all-linear"] if target == ["all"] else target, key="lora_target")
    if "additional_target" in data:
        out.set("modules_to_save", names_in(data.pop("additional_target")), key="additional_target")
    if data.pop("pissa_init", False):
        steps = data.pop("pissa_iter", 16)
        out.set("init_weights", "pissa" if steps == -1 else f"pissa_niter_{steps}", key="pissa_init")
    if data.pop("pissa_iter", None) is not None and "init_weights" not in out.values:
        out.ignore("pissa_iter", "it has a meaning only with pissa_init")
    for key in ("add_tokens", "add_special_tokens"):
        if key in data:
            out.set("new_special_tokens", names_in(data.pop(key)), key=key)
    if data.pop("train_on_prompt", False):
        out.set("loss_scale", "all", key="train_on_prompt")
    elif data.pop("mask_history", False):
        out.set("loss_scale", "last_round", key="mask_history")
    attention = data.pop("flash_attn", "auto")
    if attention != "auto":
        names = {"fa2": "flash_attention_2", "disabled": "eager", "sdpa": "sdpa"}
        out.set("attn_impl", names.get(attention, attention), key="flash_attn")
    if data.pop("neat_packing", False):
        out.set("packing", True, key="neat_packing")
    elif data.get("packing"):
        out.comments["packing"] = "examples in a row don't see each other here"
    if data.pop("disable_gradient_checkpointing", False):
        out.set("gradient_checkpointing", False, key="disable_gradient_checkpointing")
    if data.pop("pure_bf16", False):
        out.set("torch_dtype", "bfloat16", key="pure_bf16", comment="master weights stay fp32")
    template = data.pop("template", None)
    if template not in (None, "default", "empty"):
        out.ignore("template", f"the tokenizer's own chat template is used, not {template}")


def _preference(data: dict[str, Any], out: Conversion, stage: str) -> None:
    """Its stages are our methods; ORPO and SimPO are losses of its stage `dpo`."""
    loss = data.pop("pref_loss", None)
    method = loss if stage == "dpo" and loss in ("orpo", "simpo") else stage
    out.set("rlhf_type", method, key="stage")
    if method == "dpo" and loss is not None:
        out.set("loss_type", [loss], key="pref_loss")
    names = {"pref_beta": "beta"} if method != "rm" else {}
    weight = data.get("pref_ftx")
    if method == "dpo":
        names |= {"pref_ftx": "rpo_alpha", "dpo_label_smoothing": "label_smoothing", "ld_alpha": "ld_alpha"}
        if weight:
            out.comments["rpo_alpha"] = "cross-entropy per token; theirs is per answer, by its own length"
    if method in ("dpo", "kto"):
        names |= {"ref_model": "ref_model"}
        if "ref_model_adapters" in data:
            out.set("ref_adapters", names_in(data.pop("ref_model_adapters")), key="ref_model_adapters")
    if method == "kto":
        names |= {"kto_chosen_weight": "desirable_weight", "kto_rejected_weight": "undesirable_weight"}
    if method == "simpo":
        names |= {"simpo_gamma": "simpo_gamma", "pref_ftx": "cpo_alpha"}
    if not weight and "pref_ftx" not in names:
        data.pop("pref_ftx", None)
    out.take(data, names)
    if method == "simpo":
        out.default("beta", 0.1, TOOL)
        out.default("simpo_gamma", 0.5, TOOL)


def _defaults(out: Conversion, kind: str) -> None:
    rank = out.values.get("lora_rank", 8)
    for name, value in {
        "learning_rate": 5e-5, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
        "lr_scheduler_type": "linear", "weight_decay": 0.0, "adam_beta2": 0.999, "save_steps": 500,
        "truncation_strategy": "split" if out.command == "pt" else "right", "strict": False, "add_version": False,
        **({"lora_alpha": 2.0 * rank, "lora_dropout": 0.0} if kind != "full" else {}),
    }.items():  # fmt: skip
        out.default(name, value, TOOL)


def _mixing(data: dict[str, Any], out: Conversion) -> None:
    strategy, shares = data.pop("mix_strategy", "concat"), data.pop("interleave_probs", None)
    if not data.get("streaming"):
        data.pop("buffer_size", None)  # it means nothing there without streaming, nor here
    if strategy == "concat":
        if shares is not None:
            out.ignore("interleave_probs", "it has a meaning only with an interleaving mix_strategy")
        return
    stopping = {
        "interleave_under": "first_exhausted",
        "interleave_over": "all_exhausted",
        "interleave_once": "all_exhausted_without_replacement",
    }
    if strategy not in stopping:
        out.lose("mix_strategy", strategy, f"known: concat, {', '.join(stopping)}")
        return
    values = [float(word) for word in names_in(shares)] if shares is not None else []
    out.set("interleave_prob", values or [1.0] * max(1, len(out.values.get("dataset", []))), key="mix_strategy")
    out.set("stopping_strategy", stopping[strategy], key="mix_strategy")


def _val_size(data: dict[str, Any], out: Conversion) -> None:
    size = data.pop("val_size", 0)
    if size and float(size) >= 1:
        out.lose("val_size", size, "give the share of the rows: split_dataset_ratio 0.01")
    elif size:
        out.set("split_dataset_ratio", size, key="val_size")


def _datasets(data: dict[str, Any], out: Conversion) -> None:
    """Names in dataset_info.json become files; its column names become `columns`."""
    if "dataset_dir" in data and not data.get("dataset") and not data.get("eval_dataset"):
        out.ignore("dataset_dir", "no dataset of it is named")
    folder = str(data.pop("dataset_dir", "data"))
    samples = _max_samples(data, out)
    samples_used = False
    info_path, info = _dataset_info(folder, out)
    columns: dict[str, str] = {}
    for key, setting in (("dataset", "dataset"), ("eval_dataset", "val_dataset")):
        found = []
        for name in names_in(data.pop(key, None)):
            path = _dataset_path(name, info, info_path, out, columns)
            if path is not None:
                own = info.get(name, {}).get("num_samples")
                count = own or samples
                samples_used |= not own and path != "self-cognition"
                # theirs is a cap, ours repeats rows to reach the number
                capped = count and path != "self-cognition" and count < _num_rows(Path(path), count)
                found.append(f"{path}#{count}" if capped else path)
        if found:
            out.set(setting, found, key=key)
    if samples is not None and not samples_used:
        reason = "could not be applied: no dataset that it would shorten was found; give a number as path#rows"
        out.lose("max_samples", samples, reason)
    if columns:
        out.set("columns", columns)


def _max_samples(data: dict[str, Any], out: Conversion) -> int | None:
    given = data.pop("max_samples", None)
    try:
        return None if given is None else int(given)
    except (TypeError, ValueError):
        out.lose("max_samples", given, "it is not a whole number; give a number as path#rows")
        return None


def _num_rows(path: Path, unknown: int) -> int:
    """Rows in a json or jsonl file; more than `unknown` where that can't be told."""
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    if path.suffix == ".json" and path.is_file():
        try:
            return len(json.loads(path.read_text(encoding="utf-8-sig")))
        except ValueError:
            return unknown + 1
    return unknown + 1


def _dataset_info(folder: str, out: Conversion) -> tuple[Path, dict[str, Any]]:
    for place in (Path(folder), out.base / folder, out.base.parent / folder, out.base.parent.parent / folder):
        file = place / "dataset_info.json"
        if file.is_file():
            return place, json.loads(file.read_text(encoding="utf-8"))
    return Path(folder), {}


def _dataset_path(
    name: str, info: dict[str, Any], folder: Path, out: Conversion, columns: dict[str, str]
) -> str | None:
    entry = info.get(name)
    if entry is None:
        for candidate in (folder / name, *(folder / f"{name}{end}" for end in (".jsonl", ".json", ".csv", ".parquet"))):
            if candidate.exists():
                return str(candidate)
        if name == "identity":
            out.lose(
                "dataset identity", name, "the shipped self-cognition rows are used: give model_name and model_author"
            )
            return "self-cognition"
        out.lose(f"dataset {name}", name, f"it is not in {folder}/dataset_info.json; give its file as dataset")
        return None
    if entry.get("ranking") and out.command != "rlhf":
        out.lose(f"dataset {name}", name, "preference pairs are rows of `swift rlhf`")
        return None
    hub = next((prefix for prefix, key in (("hf", "hf_hub_url"), ("ms", "ms_hub_url")) if entry.get(key)), None)
    if "file_name" not in entry and hub is None:
        source = entry.get("script_url") or entry.get("cloud_file_name") or entry.get("om_hub_url") or "another place"
        out.lose(f"dataset {name}", source, "give its files, or a URL of them")
        return None
    names = {
        "prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system",
        "tools": "tools", "messages": "messages", "chosen": "chosen", "rejected": "rejected", "kto_tag": "label",
    }  # fmt: skip
    for theirs, column in (entry.get("columns") or {}).items():
        if theirs not in names:
            out.lose(f"dataset {name}: {theirs}", column, "models are tuned on text only so far")
        elif column and column not in (names[theirs], "conversations"):
            columns[str(column)] = names[theirs]
    known_tags = {
        "role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user"),
        "assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool"),
        "function_tag": ("function_call",), "system_tag": ("system",),
    }  # fmt: skip
    for tag, word in (entry.get("tags") or {}).items():
        if word not in known_tags.get(tag, ()):
            out.lose(f"dataset {name}: {tag}", word, "rename it in the file: role/content with user, assistant, system")
    if hub:
        split = f":{entry['split']}" if entry.get("split") else ""
        subset = f":{entry.get('subset') or ''}" if entry.get("subset") or split else ""
        return f"{hub}::{entry[f'{hub}_hub_url']}{subset}{split}"
    return str(folder / entry["file_name"])
