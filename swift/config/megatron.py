"""Names of Megatron and of `megatron sft` scripts -> ours. One engine does what both ask for.

As in `swift.config.legacy`, a name is translated, already satisfied or refused with advice, none ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping

from swift.config.values import Words

# name -> our setting, with the same meaning and values
_RENAMED = {
    "train_iters": "max_steps",
    "lr_warmup_fraction": "warmup_ratio",
    "lr_warmup_iters": "warmup_steps",
    "clip_grad": "max_grad_norm",
    "adam_eps": "adam_epsilon",
    "eval_interval": "eval_steps",
    "save_interval": "save_steps",
    "save": "output_dir",
    "load": "resume_from_checkpoint",
    "no_save_optim": "save_only_model",
    "no_load_optim": "resume_only_model",
    "num_workers": "dataloader_num_workers",
    "seq_length": "max_length",
    "tensorboard_dir": "logging_dir",
    "log_interval": "logging_steps",
}

_INTERLEAVED = {"pipeline_schedule": "interleaved"}
_SHARDED = {"no_shard": "none", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}

# name -> value -> settings; `*` stands for any value, and for itself in the settings
_TRANSLATED: dict[str, dict[str, dict[str, str]]] = {
    "lr_decay_style": {
        "cosine": {"lr_scheduler_type": "cosine"},
        "linear": {"lr_scheduler_type": "linear"},
        "constant": {"lr_scheduler_type": "constant"},
        "wsd": {"lr_scheduler_type": "wsd"},
        "inverse-square-root": {"lr_scheduler_type": "inverse_sqrt"},
    },
    "optimizer": {"adam": {"optim": "adamw_torch_fused"}, "sgd": {"optim": "sgd"}},
    "recompute_granularity": {
        "full": {"gradient_checkpointing": "true"},
        "selective": {"gradient_checkpointing": "true"},
        "none": {"gradient_checkpointing": "false"},
    },
    "use_distributed_optimizer": {"true": {"fsdp": "fsdp2", "zero_stage": "1"}},
    "use_megatron_fsdp": {"true": {"fsdp": "fsdp2"}},
    "data_parallel_sharding_strategy": {
        word: {"fsdp": "none"} if stage == "none" else {"fsdp": "fsdp2", "zero_stage": stage}
        for word, stage in _SHARDED.items()
    },
    "optimizer_cpu_offload": {"true": {"fsdp": "fsdp2", "fsdp_cpu_offload": "true"}},
    "virtual_pipeline_model_parallel_size": {"1": {}, "*": {"pipeline_stages_per_rank": "*", **_INTERLEAVED}},
    "attention_backend": {"unfused": {"attn_impl": "eager"}},
}

_OFF = ("false", "none")
# names -> (values that ask for nothing that isn't so, why, what to do about others)
_JUDGED: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    (
        "overlap_grad_reduce overlap_param_gather overlap_p2p_comm tp_comm_overlap align_grad_reduce "
        "align_param_gather",
        ("*",), "communication overlaps with computing where it can", "",
    ),
    ("use_distributed_optimizer use_megatron_fsdp optimizer_cpu_offload", _OFF, "it is off", ""),
    ("optimizer_offload_fraction", ("1", "1.0"), "all of it is", "leave it out: fsdp_cpu_offload moves all of it"),
    ("attention_backend", ("auto", "flash", "fused", "local"), "the fastest attention that is there is chosen", ""),
    ("cp_partition_mode", ("zigzag",), "sequences are shared in a zigzag", "leave it out: zigzag balances the load"),
    (
        "cross_entropy_loss_fusion cross_entropy_fusion_impl bias_swiglu_fusion bias_dropout_fusion rope_fusion "
        "apply_rope_fusion masked_softmax_fusion persist_layer_norm gradient_accumulation_fusion moe_grouped_gemm "
        "moe_permute_fusion moe_shared_expert_overlap use_flash_attn_3 manual_gc manual_gc_interval",
        ("*",), "the kernels that are there are chosen", "",
    ),
    ("attention_softmax_in_fp32 accumulate_allreduce_grads_in_fp32", ("true",), "it is so", "leave it out: it is fp32"),
    ("no_save_rng no_load_rng", _OFF, "they are saved and restored", "leave it out: a resumed run goes on as it was"),
    ("finetune", ("*",), "a new run starts at step 0; --resume_only_model true takes only weights", ""),
    ("expert_tensor_parallel_size", ("*",), "experts are cut along tensor parallel as all matrices are", ""),
    ("recompute_method", ("uniform", *_OFF), "every layer is recomputed", "leave it out: every layer is recomputed"),
    ("recompute_num_layers", ("1", *_OFF), "every layer is recomputed", "leave it out: every layer is recomputed"),
    ("recompute_modules", ("*",), "whole layers are recomputed", ""),
    ("moe_router_dtype", ("fp32", "float32"), "routing is computed in fp32", "leave it out"),
    ("moe_token_dispatcher_type", ("alltoall",), "it is all-to-all", "leave it out: alltoall is there"),
    ("moe_enable_deepep moe_pad_expert_input_to_capacity", _OFF, "it is off", "leave it out: alltoall is there"),
    (
        "moe_expert_capacity_factor moe_token_drop_policy", _OFF, "no token is dropped",
        "leave it out: no token is dropped, however many an expert gets",
    ),
    ("moe_z_loss_coeff", ("0", "0.0", *_OFF), "no such loss is added", "balance experts with --router_aux_loss_coef"),
    (
        "moe_router_load_balancing_type", ("aux_loss", "none"), "it follows from --router_aux_loss_coef",
        "balance experts with --router_aux_loss_coef",
    ),
    ("router_replay_mode", ("disabled", *_OFF), "it is off", "it matters in reinforcement learning only"),
    (
        "main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype", ("fp32", "float32"), "it is fp32",
        "leave it out: optimizer and master weights are fp32; --fsdp_cpu_offload true saves device memory",
    ),
    ("use_precision_aware_optimizer", _OFF, "it is off", "--fsdp_cpu_offload true saves device memory"),
    (
        "fp8_format fp8_recipe fp8_param_gather fp8_amax_history_len fp8_amax_compute_algo fp4_format fp4_recipe", _OFF,
        "it is off", "low precision is being built: --torch_dtype bfloat16",
    ),
    ("mtp_num_layers mtp_decoder_input_detach", ("0", *_OFF), "there are none", "multi-token prediction is not built"),
    ("mtp_loss_scaling_factor", ("*",), "it matters only with mtp_num_layers", ""),
    ("muon_momentum muon_num_ns_steps", ("*",), "it matters only with the Muon optimizer", ""),
    ("min_lr", ("0", "0.0", *_OFF), "the schedule ends at 0", "give it as a share of the rate: --min_lr_ratio 0.1"),
    ("lr_decay_iters", _OFF, "the schedule ends with the run", "leave it out: the schedule ends with the run"),
    ("eval_iters", ("-1", *_OFF), "all evaluation rows are used", "give fewer rows: --val_dataset path#100"),
    (
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout "
        "num_layers_per_virtual_pipeline_stage", _OFF, "layers are split by cost",
        "leave it out: layers are split by cost, embedding and head counted; or give all: --pipeline_layers 10 12",
    ),
    ("async_save", _OFF, "it is off", "leave it out: checkpoints are written at once"),
    (
        "dist_ckpt_optim_fully_reshardable dist_ckpt_save_pre_mcore_014 use_persistent_ckpt_worker use_dist_ckpt "
        "distributed_timeout_minutes use_cpu_initialization use_mcore_models transformer_impl",
        ("*",), "checkpoints can be resumed with any sizes, and the rest follows from the model", "",
    ),
    ("exit_interval exit_duration_in_mins", _OFF, "the run ends by itself", "use --max_steps"),
)  # fmt: skip


def settings_meant(name: str, value: str) -> tuple[tuple[str, Words], ...] | None:
    """Our settings for a Megatron flag with this value; None where it isn't translated."""
    if name in _RENAMED:
        return ((_RENAMED[name], Words((value,))),)
    value = value.lower()
    table: Mapping[str, Mapping[str, str]] = _TRANSLATED.get(name, {})
    found = table.get(value, table.get("*"))
    if found is None:
        return None
    return tuple((setting, Words((value if word == "*" else word,))) for setting, word in found.items())


def judgement(name: str, value: str) -> tuple[str | None, str | None] | None:
    """A note or advice for a Megatron flag that isn't translated; None if Megatron has no such name."""
    for names, satisfied, note, advice in _JUDGED:
        if name in names.split():
            if satisfied == ("*",) or value in satisfied:
                return note, None
            return None, advice or f"known values: {', '.join(_TRANSLATED.get(name, satisfied))}"
    if name in _TRANSLATED:
        return None, f"known values: {', '.join(_TRANSLATED[name])}"
    return None


def names() -> set[str]:
    """Every name that is known here."""
    return {*_RENAMED, *_TRANSLATED, *(name for names, *_ in _JUDGED for name in names.split())}
