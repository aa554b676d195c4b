"""How it is trained: batches, objective, optimizer, schedule, precision, evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swift.config.fields import setting

ScheduleName = Literal[
    "cosine", "linear", "constant", "constant_with_warmup", "wsd", "cosine_with_min_lr", "inverse_sqrt", "polynomial"
]


@dataclass
class TrainingConfig:
    """Training"""

    num_train_epochs: float = setting(3.0, help="passes over the data", aliases=("num_epochs",))
    max_steps: int = setting(-1, help="optimizer steps; overrides num_train_epochs when above 0")
    per_device_train_batch_size: int = setting(
        1, help="examples per micro-batch on each device", aliases=("batch_size", "micro_batch_size")
    )
    gradient_accumulation_steps: int | None = setting(
        None, help="micro-batches per step; default: enough for 16 examples per step in all"
    )
    global_batch_size: int | None = setting(
        None, help="examples per step in all, in place of gradient_accumulation_steps"
    )
    seed: int = setting(42, help="seed of everything random")
    deterministic: bool = setting(
        False, help="bit-identical reruns; refuses kernels that can't promise it", aliases=("full_determinism",)
    )
    gradient_checkpointing: bool | None = setting(
        None, help="recompute activations in the backward pass; default: only if memory asks for it"
    )
    torch_compile: bool = setting(False, help="compile each layer (pays after some 25 steps)")
    max_grad_norm: float = setting(1.0, help="gradient clipping norm; 0: off")
    resume_from_checkpoint: str | None = setting(
        None, help="checkpoint or run folder, or `latest`: the newest whole one in output_dir (or else output/<model>)"
    )
    resume_only_model: bool = setting(False, help="take the weights only; start steps and data afresh")
    on_nonfinite: Literal["stop", "skip"] = setting(
        "stop", help="NaN or Inf loss: stop and dump the batch, or skip the step and count it"
    )
    nproc_per_node: int | None = setting(None, help="processes on this machine; default: NPROC_PER_NODE, else 1")


@dataclass
class LossConfig:
    """Objective"""

    neftune_noise_alpha: float | None = setting(None, help="NEFTune: noise on the embeddings while training")
    router_aux_loss_coef: float = setting(
        0.0,
        help="weight of the loss that balances the load of a mixture's experts, over all ranks; 0: off",
        aliases=("moe_aux_loss_coeff",),
    )
    loss_chunk_size: int = setting(
        0, help="trained tokens per chunk of the cross-entropy; 0: chosen from the vocabulary"
    )


@dataclass
class ObjectiveConfig(LossConfig):
    """Objective"""

    label_smoothing_factor: float = setting(0.0, help="label smoothing", aliases=("label_smoothing",))
    enable_dft_loss: bool = setting(False, help="DFT: each token's loss times its own probability")


@dataclass
class OptimizerConfig:
    """Optimizer"""

    optim: Literal["adamw", "adamw_torch", "adamw_torch_fused", "sgd", "adafactor"] = setting(
        "adamw_torch_fused", help="optimizer"
    )
    learning_rate: float | None = setting(
        None, help="peak rate; default: 1e-5 for full, 1e-4 for adapters", aliases=("lr",)
    )
    weight_decay: float = setting(0.1, help="decay of matrices; biases and norms are left alone")
    adam_beta1: float = setting(0.9, help="Adam beta 1")
    adam_beta2: float = setting(0.95, help="Adam beta 2")
    adam_epsilon: float = setting(1e-8, help="Adam epsilon")
    lr_scheduler_type: ScheduleName = setting("cosine", help="schedule after warm-up")
    warmup_ratio: float = setting(0.0, help="share of steps that warm up")
    warmup_steps: int = setting(0, help="steps that warm up; overrides warmup_ratio")
    min_lr_ratio: float = setting(0.0, help="floor of the schedule as a share of the peak")
    decay_ratio: float = setting(0.2, help="wsd: share of steps in the final decay")


@dataclass
class EvalConfig:
    """Evaluation"""

    eval_strategy: Literal["no", "steps", "epoch"] | None = setting(
        None,
        help="when to evaluate, if there are evaluation rows; default: as save_strategy, and with `no` once at the end",
        aliases=("evaluation_strategy",),
    )
    eval_steps: int | None = setting(None, help="default: save_steps")
    eval_on_start: bool = setting(False, help="evaluate before step 1")
    per_device_eval_batch_size: int | None = setting(
        None, help="default: per_device_train_batch_size", aliases=("eval_batch_size",)
    )
    metric_for_best_model: str = setting("eval_loss", help="metric that ranks checkpoints")
    greater_is_better: bool | None = setting(None, help="default: false for a loss or a perplexity, else true")
    load_best_model_at_end: bool = setting(False, help="end with the best weights instead of the last")
    early_stop_interval: int | None = setting(
        None, help="stop after this many evaluations without a better metric", aliases=("early_stopping_patience",)
    )


@dataclass
class CheckpointConfig:
    """Checkpoints"""

    output_dir: str | None = setting(None, help="default: output/<model>")
    add_version: bool = setting(True, help="write into a new sub-folder vN-<time> of output_dir")
    overwrite_output_dir: bool = setting(False, help="with add_version false: allow a folder that holds another run")
    save_strategy: Literal["no", "steps", "epoch"] = setting(
        "steps", help="when to save; the end is always saved unless no"
    )
    save_steps: int = setting(500, help="steps between checkpoints")
    save_total_limit: int | None = setting(None, help="checkpoints kept: the best one and the newest; default: all")
    save_only_model: bool = setting(False, help="leave out optimizer and loader state: smaller, but can't be resumed")
    create_checkpoint_symlink: bool = setting(False, help="links `best` and `last` in the run folder")


@dataclass
class MonitorConfig:
    """Logging"""

    logging_steps: int = setting(5, help="steps between logged lines")
    logging_dir: str | None = setting(None, help="TensorBoard folder; default: <run folder>/runs")
    report_to: list[Literal["tensorboard", "none"]] = setting(
        help="tensorboard or none; logging.jsonl, loss.png and report.html are always written",
        factory=lambda: ["tensorboard"],
    )
    disable_tqdm: bool = setting(False, help="plain lines instead of the live progress line")
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", help="least severity shown")
