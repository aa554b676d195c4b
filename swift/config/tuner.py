"""What is trained: everything, a part, or an adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swift.config.fields import setting

TunerType = Literal[
    "lora", "full", "adalora", "ia3", "vera", "boft", "oft", "fourierft", "miss", "bone", "loha", "lokr", "hra"
]


@dataclass
class TunerConfig:
    """Tuner"""

    tuner_type: TunerType = setting(
        "lora", help="full or a kind of adapter", aliases=("train_type", "sft_type", "finetuning_type")
    )
    target_modules: list[str] = setting(
        help="modules that get an adapter: all-linear, all-embedding, or name endings",
        factory=lambda: ["all-linear"],
        aliases=("lora_target_modules", "lora_target"),
    )
    target_regex: str | None = setting(None, help="regular expression over full module names; replaces target_modules")
    target_parameters: list[str] = setting(help="parameters that get LoRA directly (fused MoE weights)", factory=list)
    modules_to_save: list[str] = setting(
        help="further modules trained in full beside the adapter", factory=list, aliases=("lora_modules_to_save",)
    )
    lora_rank: int = setting(8, help="rank", aliases=("lora_r",))
    lora_alpha: float = setting(32, help="scale; the update is multiplied by alpha / rank")
    lora_dropout: float = setting(0.05, help="dropout on the adapter's input", aliases=("lora_dropout_p",))
    lora_bias: Literal["none", "all", "lora_only"] = setting("none", help="which biases are trained")
    init_weights: str = setting(
        "true",
        help="true (the kind's own), false, and for LoRA gaussian, pissa, pissa_niter_N, olora, orthogonal, mica; "
        "for MiSS bat, mini",
        aliases=("init_lora_weights",),
    )
    use_dora: bool = setting(False, help="DoRA: weight-decomposed LoRA")
    use_rslora: bool = setting(False, help="rank-stabilised scaling, alpha / sqrt(rank)")
    lorap_lr_ratio: float | None = setting(
        None,
        help="LoRA+: learning rate of B over that of A (paper: 16)",
        aliases=("loraplus_lr_ratio", "lora_lr_ratio"),
    )
    adalora_target_r: int = setting(8, help="AdaLoRA: average rank at the end")
    adalora_init_r: int = setting(12, help="AdaLoRA: rank at the start")
    adalora_orth_reg_weight: float = setting(0.5, help="AdaLoRA: weight of the orthogonality term")
    vera_rank: int = setting(256, help="VeRA: rank")
    vera_d_initial: float = setting(0.1, help="VeRA: initial value of d")
    boft_block_size: int = setting(4, help="BOFT: block size")
    boft_n_butterfly_factor: int = setting(1, help="BOFT: butterfly factors")
    oft_block_size: int = setting(32, help="OFT: block size")
    fourier_n_frequency: int = setting(2000, help="FourierFT: frequencies per matrix")
    fourier_scaling: float = setting(300.0, help="FourierFT: scale")
    freeze_parameters: list[str] = setting(help="full tuning: name prefixes to freeze", factory=list)
    freeze_parameters_regex: str | None = setting(None, help="full tuning: names to freeze")
    freeze_parameters_ratio: float = setting(0.0, help="full tuning: share of parameters to freeze, from the bottom up")
    trainable_parameters: list[str] = setting(help="full tuning: name prefixes to train after freezing", factory=list)
    trainable_parameters_regex: str | None = setting(None, help="full tuning: names to train after freezing")
