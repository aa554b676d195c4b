"""How a model is tuned towards answers that are preferred, scored or taught: the settings of `swift rlhf`.

Some defaults depend on the method and on `compat`; `settle` says what they are, so that the dataclasses can tell what
was left open from what was asked for. Nothing here knows a formula.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swift.config.fields import setting
from swift.config.tuner import TunerConfig

Method = Literal["dpo", "orpo", "simpo", "kto", "cpo", "rm", "gkd"]
LossName = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft", "simpo", "alphapo", "kto", "apo_zero_unpaired",
]  # fmt: skip


# losses by method, where there is a choice; those with label smoothing; those that an f-divergence can be put into;
# those that couple the pairs of a step
_PAIR_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft",
)  # fmt: skip
LOSSES: dict[str, tuple[str, ...]] = {
    "dpo": _PAIR_LOSSES,
    "cpo": ("sigmoid", "hinge", "ipo"),
    "simpo": ("simpo", "alphapo"),
    "kto": ("kto", "apo_zero_unpaired"),
}
SMOOTHED = ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired", "sigmoid_norm", "simpo", "alphapo")
OF_DIFFERENCE = ("sigmoid", "hinge", "exo_pair", "robust", "discopop", "sft")
SORTED = ("aot", "aot_unpaired")


@dataclass
class PreferenceConfig:
    """Preference optimisation"""

    rlhf_type: Method = setting(
        "dpo", help="method; rm trains a reward model, gkd distils a teacher", aliases=("preference_type",)
    )
    compat: Literal["ours", "trl", "ms-swift"] = setting(
        "ours", help="reproduce another tool where its numbers differ: docs/algorithms.md lists where"
    )
    loss_type: list[LossName] = setting(
        help="losses of a pair, added up with loss_weights; default: sigmoid for dpo and cpo, simpo, or kto",
        factory=list,
        aliases=("pref_loss", "dpo_loss"),
    )
    loss_weights: list[float] = setting(help="weight of each loss_type; default: 1 each", factory=list)
    beta: float | None = setting(
        None,
        help="strength of the reference (dpo, kto), scale of the loss (simpo, cpo, orpo), or where gkd's divergence is "
        "between forward (0) and reverse KL (1); default: 2.0 for simpo, 0.5 for gkd, else 0.1",
        aliases=("pref_beta", "rl_beta", "dpo_beta"),
    )
    label_smoothing: float = setting(
        0.0,
        help="share of pairs that are thought to be labelled the wrong way round (below 0.5)",
        aliases=("dpo_label_smoothing", "pref_label_smoothing"),
    )
    reference: Literal["auto", "adapter_off", "precompute", "copy"] = setting(
        "auto",
        help="its log-probabilities: from the model with its adapter switched off, worked out before step 1, or from a "
        "second model held all the time; auto: adapter_off for new adapters, else precompute",
    )
    precompute_ref_log_probs: bool = setting(
        False, help="the same as reference precompute", aliases=("precompute_ref_logprobs",)
    )
    ref_model: str | None = setting(
        None, help="reference model; default: the model before training", aliases=("ref_model_name_or_path",)
    )
    ref_adapters: list[str] = setting(
        help="adapter folders of the reference model", factory=list, aliases=("ref_model_adapters",)
    )
    reference_free: bool = setting(False, help="take the reference as uniform: log-probabilities alone")
    sync_ref_model: bool = setting(False, help="TR-DPO: move the reference towards the model as the run goes on")
    ref_model_sync_steps: int = setting(512, help="TR-DPO: steps between two moves")
    ref_model_mixup_alpha: float = setting(0.6, help="TR-DPO: share of the model in the reference after a move")
    rpo_alpha: float | None = setting(
        None,
        help="dpo: weight of the chosen answers' cross-entropy per token, beside the loss; default: 0",
        aliases=("pref_ftx", "dpo_ftx"),
    )
    ld_alpha: float | None = setting(
        None, help="LD-DPO: weight of the tokens beyond the shorter answer's length; default: 1 (plain DPO)"
    )
    discopop_tau: float = setting(0.05, help="discopop: temperature of the blend", aliases=("discopop_temperature",))
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = setting(
        "reverse_kl", help="f-DPO: divergence that holds the model near the reference"
    )
    f_alpha_divergence_coef: float = setting(
        1.0, help="alpha of alpha_divergence, 1: reverse_kl", aliases=("f_alpha_divergence",)
    )
    use_weighting: bool = setting(False, help="WPO: weigh a pair by how likely its answers are under the model")
    simpo_gamma: float | None = setting(None, help="simpo: margin; default: 1.0")
    cpo_alpha: float | None = setting(
        None, help="cpo, simpo: weight of the chosen answers' cross-entropy per token; default: 1 for cpo, 0 for simpo"
    )
    alphapo_alpha: float = setting(0.0, help="AlphaPO: shape of the reward; 0: SimPO", aliases=("alpha_po_alpha",))
    desirable_weight: float = setting(1.0, help="kto: weight of desirable rows", aliases=("kto_chosen_weight",))
    undesirable_weight: float = setting(1.0, help="kto: weight of undesirable rows", aliases=("kto_rejected_weight",))
    center_rewards_coefficient: float | None = setting(
        None, help="rm: weight of the term that centres rewards on 0 (0.01 is usual); default: 0"
    )
    disable_dropout: bool = setting(
        True, help="switch all dropout off, also lora_dropout, so that model and reference differ by training only"
    )
    share_prompts: Literal["auto", "true", "false"] = setting(
        "auto",
        help="compute the prompt that a pair's answers share once; auto: where the attention allows it and it pays",
    )


@dataclass
class DistillConfig:
    """Distillation"""

    teacher_model: str | None = setting(
        None,
        help="teacher: local folder or hub id; its tokenizer must be the model's",
        aliases=("teacher_model_name_or_path",),
    )
    teacher_adapters: list[str] = setting(help="adapter folders of the teacher", factory=list)
    teacher_model_server: str | None = setting(
        None, help="teacher: address of an OpenAI endpoint that gives log-probabilities of prompts"
    )
    teacher_logits: str | None = setting(
        None,
        help="teacher: folder of its likeliest tokens; with teacher_model, it is filled first if it isn't there",
    )
    teacher_self: bool = setting(
        False, help="teacher: the model itself, with its adapter switched off, or with teacher_prompt"
    )
    teacher_prompt: str | None = setting(
        None,
        help="with teacher_self: system prompt that only the teacher sees, where rows have none (text or a .txt file)",
    )
    offload_teacher_model: bool = setting(False, help="keep the teacher in CPU memory while it isn't needed")
    lmbda: float = setting(
        0.5, help="share of steps on answers that the model has just generated; 0: only the rows' own"
    )
    seq_kd: bool = setting(False, help="train on answers that the teacher generates, in place of the rows' own")
    on_policy_objective: Literal["jsd", "policy_gradient"] = setting(
        "jsd",
        help="for the model's own answers: the divergence over the vocabulary, or a policy gradient with the teacher's "
        "log-ratio of each token as its advantage",
    )
    max_completion_length: int = setting(512, help="tokens of a generated answer")
    temperature: float = setting(0.9, help="of sampling answers")
    top_p: float = setting(1.0, help="nucleus sampling of answers")
    top_k: int = setting(0, help="sample answers from the k likeliest tokens; 0: all")
    distill_temperature: float | None = setting(None, help="divides both models' logits in the loss; default: 1.0")
    gkd_logits_topk: int | None = setting(
        None, help="compare only the teacher's k likeliest tokens; default: the whole vocabulary"
    )
    topk_tail: Literal["bucket", "renormalise"] | None = setting(
        None, help="the rest of the vocabulary: as one token more, or left out; default: bucket"
    )
    sft_alpha: float = setting(0.0, help="weight of the rows' own cross-entropy beside the divergence")


@dataclass(frozen=True)
class Settled:
    """What `settle` found for the settings that may be left open.

    Attributes:
        losses: name and weight of each; for orpo, rm and gkd, which have one loss only, the method's own name.
    """

    losses: tuple[tuple[str, float], ...]
    beta: float
    cpo_alpha: float
    simpo_gamma: float
    distill_temperature: float
    topk_tail: Literal["bucket", "renormalise"]


# starts of an adapter that leave the base weights alone and add nothing to them
_BASE_UNCHANGED = ("true", "gaussian", "orthogonal", "bat", "mini")
_LOSS: dict[str, str] = {"dpo": "sigmoid", "cpo": "sigmoid"}
_BETA: dict[str, float] = {"simpo": 2.0, "gkd": 0.5}


def settle(preference: PreferenceConfig, distill: DistillConfig | None = None) -> Settled:
    """The values of settings that were left open, by method and `compat`.

    TRL gives SimPO the `beta` of CPO and a margin of 0.5; ms-swift adds the cross-entropy of CPO to SimPO, divides
    the logits in GKD's loss by the temperature of sampling, and renormalises a teacher's top-k.
    """
    distill = distill or DistillConfig()
    method, compat = preference.rlhf_type, preference.compat
    names: list[str] = [*preference.loss_type] or [_LOSS.get(method, method)]
    weights = preference.loss_weights or [1.0] * len(names)
    beta = preference.beta
    if beta is None:
        beta = 0.1 if (method, compat) == ("simpo", "trl") else _BETA.get(method, 0.1)
    alpha = preference.cpo_alpha
    if alpha is None:
        alpha = 1.0 if method == "cpo" or (method, compat) == ("simpo", "ms-swift") else 0.0
    gamma = preference.simpo_gamma
    if gamma is None:
        gamma = 0.5 if compat == "trl" else 1.0
    temperature = distill.distill_temperature
    if temperature is None:
        temperature = distill.temperature if compat == "ms-swift" else 1.0
    tail = distill.topk_tail or ("renormalise" if compat == "ms-swift" else "bucket")
    return Settled(tuple(zip(names, weights, strict=True)), beta, alpha, gamma, temperature, tail)


ReferenceWay = Literal["none", "adapter_off", "precompute", "copy"]
WITH_REFERENCE = ("dpo", "kto")


def reference_way(preference: PreferenceConfig, tuner: TunerConfig, adapters: list[str]) -> ReferenceWay:
    """Where the reference's log-probabilities come from.

    With its adapter switched off, a model is the reference only if the adapter is new and nothing else has changed:
    an adapter that is trained on was part of the reference, starts such as PiSSA take their share out of the base
    weights, and trained biases stay as they are.

    Args:
        preference: what `reference` auto is to be decided for.
        tuner: what is trained.
        adapters: adapters that the training starts from.
    """
    if preference.rlhf_type not in WITH_REFERENCE or preference.reference_free:
        return "none"
    if preference.precompute_ref_log_probs:
        return "precompute"
    if preference.reference != "auto":
        return preference.reference
    named = preference.ref_model or preference.ref_adapters
    return "precompute" if named or why_not_adapter_off(tuner, adapters) else "adapter_off"


def why_not_adapter_off(tuner: TunerConfig, adapters: list[str]) -> str | None:
    """Why the model with its adapter switched off is not the model before training; None if it is."""
    if tuner.tuner_type == "full":
        return "in full tuning there is no adapter to switch off"
    if adapters:
        return "the adapter that the training starts from belongs to the reference"
    if tuner.lora_bias != "none":
        return f"lora_bias {tuner.lora_bias} trains biases, which stay on"
    if tuner.init_weights.lower() not in _BASE_UNCHANGED:
        return f"init_weights {tuner.init_weights} moves a part of the model into the adapter"
    return None
