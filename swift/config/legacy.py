"""Names from ms-swift and Hugging Face scripts that are not settings here.

Three kinds, and none is ignored in silence: translated to our setting, already satisfied (accepted with a one-line
note), or not available yet (refused, with what to do instead). Spellings that mean exactly one of our settings are
not here but in that setting's `aliases`.
"""

from __future__ import annotations

from dataclasses import dataclass

from swift.config import megatron
from swift.config.values import FALSE_WORDS, NONE_WORDS, TRUE_WORDS, Words

ANY = ("*",)
OFF = ("false", "none")


@dataclass(frozen=True)
class Rule:
    """What happens to a foreign flag.

    Attributes:
        instead: what to do when its value asks for something that isn't there.
        satisfied: values (lower case; ``*`` any) with which nothing is asked that isn't so already.
        note: why it is satisfied.
    """

    instead: str = ""
    satisfied: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The outcome for one foreign flag: settings to use in its place, a note, or a refusal with advice."""

    settings: tuple[tuple[str, Words], ...] = ()
    note: str | None = None
    instead: str | None = None


def _later(
    names: str, instead: str, satisfied: tuple[str, ...] = OFF, note: str = "it is off here as well"
) -> dict[str, Rule]:
    return {name: Rule(instead, satisfied, note) for name in names.split()}


def _satisfied(names: str, note: str, satisfied: tuple[str, ...] = ANY, instead: str = "") -> dict[str, Rule]:
    return {name: Rule(instead, satisfied, note) for name in names.split()}


_RL = "reinforcement learning is being built; `swift rlhf` tunes by preferences, trains reward models and distils"
_RL_METHOD = "it comes with reinforcement learning, which is being built; there are: dpo orpo simpo kto cpo rm gkd"
_TEACHER = "give --teacher_model, --teacher_model_server, --teacher_logits or --teacher_self"
_PARALLEL = (
    "say it with --fsdp, --tensor_parallel_size, --sequence_parallel_size and the like: `swift sft --help parallel`"
)
_FSDP = "--zero_stage, --fsdp_cpu_offload and --reduce_dtype say what fsdp does"
_QUANT = "load the model unquantized; --torch_dtype bfloat16 and --gradient_checkpointing true save memory"
_TEXT = "models are tuned on text only so far"
_ENGINE = (
    "it is of `swift infer` and `swift deploy`; what they don't know goes behind --engine_args in the engine's words"
)
_GALORE = "choose an adapter (--tuner_type lora) or --optim adafactor to save optimizer memory"

RULES: dict[str, Rule] = {
    # parallelism and kernels
    **_later("zero_hpz_partition_size deepspeed_autotp_size use_ray device_groups", _PARALLEL),
    **_later("fsdp_config", _FSDP, ("{}", *OFF)),
    **_later(
        "device_map",
        "the model is placed on this process's device; choose it with CUDA_VISIBLE_DEVICES",
        ("auto", *OFF),
    ),
    **_later(
        "use_liger_kernel use_liger",
        "leave it out: the loss already works on trained tokens only, in chunks, without the full logits",
    ),
    **_later(
        "use_unsloth use_unsloth_gc", "leave it out: adapters run on peft and are compiled with --torch_compile true"
    ),
    **_later("use_flash_ckpt", "leave it out: checkpoints are written atomically"),
    **_later("experts_impl init_strategy", "leave it out: the model's own code decides"),
    **_later("torch_compile_backend torch_compile_mode", "leave it out; --torch_compile true compiles each layer"),
    **_later("tf32", "leave it out; fp32 stays fp32"),
    # quantized loading
    **_later(
        "quant_method quant_bits quantization_bit quantization_method load_in_4bit load_in_8bit bnb_4bit_comp_dtype "
        "bnb_4bit_compute_dtype bnb_4bit_quant_storage hqq_axis",
        _QUANT,
        ("0", *OFF),
    ),
    **_satisfied("bnb_4bit_quant_type bnb_4bit_use_double_quant", "it matters only with quantized loading"),
    # data
    **_later(
        "custom_dataset_info custom_register_path",
        "give the file itself: --dataset path, and --columns for its names",
        ("[]", *OFF),
    ),
    **_satisfied("load_from_cache_file", "rows are tokenised anew in every run"),
    **_satisfied("lazy_tokenize", "rows are tokenised before step 1, so that a bad one is found there"),
    **_satisfied(
        "dataloader_pin_memory dataloader_persistent_workers",
        "batches are small, and processes of the loader live as long as the run",
    ),
    **_satisfied("remove_unused_columns", "unknown columns are kept beside a row and never reach the model"),
    **_later("dataloader_drop_last", "leave it out: every row is seen once per epoch, the last batch weighted right"),
    **_satisfied("packing_num_proc", "packing gives the same rows for any number of processes"),
    **_satisfied("packing_strategy", "best-fit decreasing is the strategy", ("binpack",), "only binpack is there"),
    **_satisfied("padding_side", "training doesn't depend on the side"),
    **_satisfied("template_backend", "the tokenizer's own chat template is used in training and inference"),
    **_later("agent_template", "leave it out: tools are rendered by the model's own chat template"),
    **_later("preserve_thinking", "leave it out: the template decides which earlier thoughts it keeps"),
    **_later("is_binary_loss_scale", "leave it out: weights are used as they are"),
    **_later("response_prefix", "write the prefix into the answers"),
    # what is trained on what
    **_later("enable_channel_loss", "train the channels in separate runs to see their losses"),
    **_later(
        "predict_with_generate eval_use_evalscope metric acc_strategy eval_metric",
        "evaluation reports the loss; `swift infer --val_dataset` writes answers",
        ("token", "acc", *OFF),
    ),
    **_later("vit_lr aligner_lr max_pixels norm_bbox vit_gradient_checkpointing use_dummy", _TEXT),
    **_satisfied("freeze_vit freeze_aligner", "text models have no such part"),
    **_later("freeze_llm", "freeze parts with --freeze_parameters and --freeze_parameters_ratio"),
    # tuners and optimizers
    **_later("use_galore use_adam_mini use_badam galore_quantization", _GALORE),
    **_later(
        "optimizer",
        "choose with --optim: adamw, sgd or adafactor; LoRA+ is --lorap_lr_ratio 16",
        ("default", "lorap", *OFF),
        "the optimizer follows from the other settings",
    ),
    **_later("lisa_activated_layers", "freeze layers with --freeze_parameters_ratio", ("0", *OFF)),
    **_satisfied("lisa_step_interval", "it matters only with LISA"),
    **_satisfied("tuner_backend", "adapters are peft's", ("peft",), "adapters run on peft: leave it out"),
    **_later(
        "lora_dtype",
        "adapters are trained in fp32: leave it out",
        ("float32", "fp32", "auto", *OFF),
        "adapters are trained in fp32",
    ),
    **_satisfied("optim_args gradient_checkpointing_kwargs", "", OFF, "leave it out: there are no such options"),
    # training
    **_satisfied(
        "average_tokens_across_devices",
        "the loss is always averaged over all tokens of a step",
        ("true",),
        "leave it out: the loss is averaged over all tokens of a step, whatever the number of processes",
    ),
    **_later("max_epochs", "use --num_train_epochs"),
    **_later("ignore_data_skip", "use --resume_only_model true to start the data afresh"),
    **_later("auto_find_batch_size", "choose --per_device_train_batch_size yourself"),
    **_later("callbacks external_plugins", "plug-ins are being built", ("[]", *OFF)),
    **_later("model_kwargs", "set what you need in the model's config.json", ("{}", *OFF)),
    **_satisfied("do_train do_eval prediction_loss_only", "it follows from the command and the evaluation rows"),
    **_satisfied(
        "ddp_backend ddp_timeout ddp_find_unused_parameters ddp_broadcast_buffers",
        "it follows from the devices and the model",
    ),
    **_satisfied(
        "save_safetensors safe_serialization",
        "weights are always safetensors",
        ("true",),
        "weights are always safetensors",
    ),
    **_satisfied("save_on_each_node", "rank 0 writes to a shared folder", ("false",), "use a shared --output_dir"),
    **_satisfied("check_model", "local files are never compared with a hub"),
    **_satisfied(
        "ignore_args_error", "an unknown flag is always an error", ("false",), "remove the flags that aren't known"
    ),
    **_satisfied("use_cpu no_cuda", "the CPU is used where there is no accelerator; CUDA_VISIBLE_DEVICES= hides GPUs"),
    **_satisfied(
        "logging_first_step logging_nan_inf_filter log_on_each_node include_num_input_tokens_seen plot_loss",
        "it is always so",
    ),
    **_satisfied("run_name", "runs are named by their folder"),
    **_satisfied(
        "push_to_hub", "nothing is uploaded", ("false",), "upload the run folder yourself: `hf upload REPO FOLDER`"
    ),
    **_later(
        "hub_model_id hub_token hub_private_repo hub_strategy",
        "nothing is uploaded; for private models set HF_TOKEN in the environment",
    ),
    **_later(
        "wandb_project swanlab_project swanlab_exp_name swanlab_workspace swanlab_token swanlab_mode",
        "TensorBoard files, logging.jsonl and report.html are written",
    ),
    # preference tuning and RL
    **_later(
        "num_generations reward_funcs reward_weights "
        "reward_model reward_model_plugin reward_adapters steps_per_generation num_iterations epsilon epsilon_high "
        "delta importance_sampling_level advantage_estimator scale_rewards kl_in_reward dynamic_sample overlong_filter "
        "top_entropy_quantile sleep_level offload_model offload_optimizer async_generate multi_turn_scheduler "
        "max_turns log_completions generation_batch_size "
        "log_entropy max_resample_times num_ppo_epochs whiten_rewards kl_coef cliprange vf_coef response_length "
        "move_model_batches use_gym_env gym_env "
        "advantage_reweight cliprange_value completion_length_limit_scope context_manager enable_flattened_weight_sync "
        "gamma lam local_rollout_forward_batch_size log_rollout_offpolicy_metrics "
        "missing_eos_penalty num_generations_eval num_mini_batches num_sample_generations "
        "off_policy_sequence_mask_delta real_tau tau_neg tau_pos wandb_log_unique_prompts",
        _RL,
    ),
    **_later("max_prompt_length", "--max_length bounds prompt and answer together"),
    **_satisfied("precompute_ref_batch_size", "it needs no gradients, and takes the batches of the evaluation"),
    **_satisfied(
        "ref_model_type ref_model_revision teacher_model_type", "a model's own files say what it is; a folder is whole"
    ),
    **_later("teacher_model_revision", "name a local folder as teacher_model"),
    **_later("teacher_deepspeed", "the teacher is held as the model is; --offload_teacher_model true saves memory"),
    **_satisfied("dataset_kwargs padding_value label_pad_token_id is_encoder_decoder", "it is found by itself"),
    # engines and servers
    **_later("use_vllm use_lmdeploy", "--infer_backend vllm or lmdeploy says it"),
    **_later("gpu_memory_utilization", _ENGINE),
    **_later(
        "host port api_key served_model_name owned_by log_interval max_logprobs ssl_certfile ssl_keyfile base_url "
        "server_name server_port share lang studio_title is_multimodal",
        "the server and the studio are being built",
    ),
    **_later(
        "eval_backend eval_generation_config eval_limit eval_num_proc eval_output_dir eval_url extra_eval_args "
        "eval_dataset_args local_dataset",
        "benchmarks are being built; evaluation reports the loss of --val_dataset",
    ),
    **_later(
        "quant_batch_size commit_message mcore_adapter mcore_model test_convert_dtype "
        "test_convert_precision thread_count save_missing_weights",
        "exporting is being built",
    ),
    **_later("sampler_engine", "--infer_backend says what runs the model; --sampler_url draws from an endpoint"),
    **_later(
        "sampler_type",
        "--sampler_url and --sampler_model draw from an endpoint; best-of-n by rewards is --num_return_sequences with "
        "--reward, --orm_model or --prm_model",
        ("sample",),
        "answers are sampled",
    ),
    **_satisfied("num_sampling_batch_size", "prompts are taken as answers are ready; see --max_batch_size"),
    **_later("num_sampling_batches", "--dataset path#rows takes some rows"),
    **_later(
        "data_range", "--nproc_per_node and --nnodes share the prompts among processes; --dataset path#rows takes some"
    ),
    **_later("engine_kwargs", "say it with the settings of the engine, or in its own words with --engine_args"),
    **_later("val_dataset_sample", "write --val_dataset path#rows"),
    **_satisfied("write_batch_size", "every result is written when it is there"),
    **_satisfied("use_logits_to_keep", "logits are computed for trained tokens only"),
    **_satisfied("verbose", "see --log_level"),
    **_later(
        "to_ollama to_mcore to_hf to_peft_format quant_n_samples group_size",
        "exporting is being built",
    ),
}

_OF_RLHF = {
    **_later("task_type", "it follows from --rlhf_type", ("causal_lm", "seq_cls", *OFF), "rlhf_type says it"),
    **_later("num_labels", "a reward is one number", ("1", *OFF), "a reward is one number"),
    **_later("min_p", "choose --top_p or --top_k", ("0", "0.0", *OFF)),
}

# configuration class -> settings of training that scripts also give to that command, where they mean nothing
OF_COMMAND: dict[str, dict[str, Rule]] = {
    "InferConfig": {
        **_satisfied(
            "max_length cutoff_len max_seq_length sequence_len truncation_strategy",
            "prompts are never cut; --max_new_tokens bounds the answer, --max_model_len both together",
        ),
        **_satisfied("loss_scale history_turns add_non_thinking_prefix", "it matters only in training"),
        **_satisfied("strict max_bad_rows", "a row that can't be answered gets a line in the results that says why"),
        **_satisfied("dataset_num_proc preprocessing_num_workers", "rows are read while others are answered"),
        **_satisfied(
            "dataloader_num_workers dataloader_prefetch_factor streaming shuffle_buffer_size interleave_prob "
            "interleave_probs stopping_strategy",
            "rows are answered in their order, and read while others are answered",
        ),
        **_later(
            "split_dataset_ratio val_size",
            "--load_data_args true answers the rows that a training set aside; --val_dataset path#rows takes a sample",
            ("0", "0.0", "none"),
            "no rows are set aside",
        ),
        **_satisfied("num_labels problem_type label_names", "the model's own config says it"),
        **_satisfied("loss_type", "it matters only in training"),
    },
    "RlhfConfig": _OF_RLHF,
    "MegatronRlhfConfig": _OF_RLHF,
}

PREFIXES: dict[str, str] = {
    "vllm_": _ENGINE,
    "sglang_": _ENGINE,
    "lmdeploy_": _ENGINE,
    "rollout_": _RL,
    "chord_": _RL,
    "rlsd_": _RL,
    "sdar_": _RL,
    "fipo_": _RL,
    "cosine_": _RL,
    "repetition_": _RL,
    "soft_": _RL,
    "reward_": _RL,
    "ref_": "say it with --reference, --ref_model and --ref_adapters",
    "teacher_": _TEACHER,
    "galore_": _GALORE,
    "reft_": "choose --tuner_type lora",
    "llamapro_": "choose --tuner_type lora",
    "adapter_": "choose --tuner_type lora",
    "lora_ga_": "choose --init_weights pissa or olora",
    "moe_": "leave it out: the model's own code decides; --expert_parallel_size shares the experts",
    "recompute_": "use --gradient_checkpointing true",
    "swanlab_": "TensorBoard files are written",
    "hub_": "nothing is uploaded",
    "fsdp_": _FSDP,
    "ddp_": "leave it out",
    "eval_dataset_": "use --val_dataset",
}

# value spellings of older scripts
VALUE_NAMES: dict[str, dict[str, str]] = {
    "torch_dtype": {
        "bf16": "bfloat16",
        "fp16": "float16",
        "fp32": "float32",
        "half": "float16",
        "float": "float32",
        "auto": "none",
    },
    "attn_impl": {"flash_attn": "flash_attention_2", "fa2": "flash_attention_2", "math": "eager"},
    "report_to": {"all": "tensorboard"},
    "eval_strategy": {"false": "no"},
    "save_strategy": {"false": "no"},
    "template": {"auto": "none", "default": "none"},
    "infer_backend": {"pt": "transformers", "llama.cpp": "llamacpp"},
    "loss_type": {
        "pointwise_reranker": "pointwise",
        "listwise_reranker": "listwise",
        "aot_pair": "aot",
    },
    "topk_tail": {"renormalize": "renormalise"},
    "fsdp": {
        **dict.fromkeys(("full_shard", "full_shard auto_wrap", "true", "fsdp", "2"), "fsdp2"),
        **dict.fromkeys(("hybrid_shard", "hybrid_shard auto_wrap"), "hsdp"),
        **dict.fromkeys(("false", "no", "no_shard", "[]"), "none"),
    },
}

# values of our settings that other tools know and this version lacks
VALUES_LATER: dict[str, dict[str, str]] = {
    "report_to": dict.fromkeys(
        ("wandb", "swanlab", "mlflow", "comet_ml", "trackio"), "tensorboard, logging.jsonl and report.html are there"
    ),
    "tuner_type": {
        "qlora": _QUANT,
        "dora": "use --tuner_type lora --use_dora true",
        **dict.fromkeys(
            ("longlora", "lora_llm", "llamapro", "adapter", "reft", "dummy", "freeze"),
            "the kinds that are there: lora full adalora ia3 vera boft oft fourierft bone loha lokr hra",
        ),
    },
    "optim": dict.fromkeys(
        (
            *("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lomo", "adalomo", "muon"),
            *("galore_adamw", "apollo_adamw", "schedule_free_adamw", "lion_8bit", "lion_32bit"),
        ),
        "adamw_torch_fused, sgd and adafactor are there",
    ),
    "fsdp": {
        **dict.fromkeys(("shard_grad_op", "shard_grad_op auto_wrap"), "use --fsdp fsdp2 --zero_stage 2"),
        **dict.fromkeys(
            ("full_shard offload", "full_shard auto_wrap offload"), "use --fsdp fsdp2 --fsdp_cpu_offload true"
        ),
    },
    "rlhf_type": dict.fromkeys(("ppo", "grpo"), _RL_METHOD),
    "attn_impl": dict.fromkeys(
        ("flash_attention_3", "flash_attention_4", "flex_attention", "xformers"),
        "leave it out: the fastest attention that is there is chosen",
    ),
    "save_strategy": {"best": "the best checkpoint is kept beside the newest: --save_total_limit 1"},
    "lr_scheduler_type": dict.fromkeys(
        ("cosine_with_restarts", "reduce_lr_on_plateau", "warmup_stable_decay"),
        "cosine, linear, constant and wsd are there",
    ),
}


def judge(name: str, words: Words, config: str = "") -> Verdict | None:
    """What a foreign flag means here; None if nobody knows it.

    Args:
        name: the flag without dashes, with underscores.
        words: its value; empty for a bare flag.
        config: name of the configuration class that lacks it.
    """
    value = (" ".join(words) or "true").strip().lower()
    on = value in TRUE_WORDS
    off = value in FALSE_WORDS or value in NONE_WORDS
    if name in ("bf16", "fp16", "fp32", "bf16_full_eval", "fp16_full_eval") and (on or off or value == "auto"):
        if not on or name.endswith("eval"):
            return Verdict(note=f"--{name}: precision follows --torch_dtype")
        return Verdict((("torch_dtype", Words((VALUE_NAMES["torch_dtype"][name],))),))
    if name in ("use_flash_attn", "use_flash_attention", "flash_attention"):
        return Verdict((("attn_impl", Words(("flash_attention_2",))),)) if on else Verdict(note=f"--{name}: off")
    if name == "template_mode" and config == "ExportConfig":
        kinds = {"train": "sft", "rlhf": "rlhf", "kto": "kto"}
        if value in kinds:
            return Verdict((("cached_for", Words((kinds[value],))),))
        return Verdict(instead="--cached_for says what trains on the rows: sft, pt, rlhf or kto")
    if name in ("do_sample",):
        return (
            Verdict(note="--do_sample true: sampling follows --temperature")
            if on
            else Verdict((("temperature", Words(("0",))),))
        )
    if config != "InferConfig" and (settings := megatron.settings_meant(name, " ".join(words) or "true")) is not None:
        return Verdict(settings, note=None if settings else f"--{name}: nothing to do")
    rule = OF_COMMAND.get(config, {}).get(name) or RULES.get(name)
    if rule is None and (found := megatron.judgement(name, _canonical(value))) is not None:
        note, instead = found
        return Verdict(note=f"--{name}: {note}") if note else Verdict(instead=instead)
    if rule is None:
        advice = next((PREFIXES[p] for p in PREFIXES if name.startswith(p)), None)
        return Verdict(instead=advice) if advice else None
    if rule.satisfied == ANY or _canonical(value) in rule.satisfied:
        return Verdict(note=f"--{name}: {rule.note or 'nothing to do'}")
    return Verdict(instead=rule.instead)


def _canonical(value: str) -> str:
    if value in NONE_WORDS:
        return "none"
    if value in FALSE_WORDS - {"0"}:
        return "false"
    if value in TRUE_WORDS - {"1"}:
        return "true"
    return value


def rename_value(name: str, words: Words) -> Words:
    """Older spellings of a setting's values in today's spelling."""
    table = VALUE_NAMES.get(name)
    return Words(table.get(word.lower(), word) for word in words) if table else words


def missing_value(name: str, words: Words) -> str | None:
    """Advice if a setting is asked for a value that other tools have and this version lacks."""
    table = VALUES_LATER.get(name, {})
    return next((table[word.lower()] for word in words if word.lower() in table), None)
