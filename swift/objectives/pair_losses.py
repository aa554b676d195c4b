"""Losses of preference pairs as functions of the sequences' log-probabilities: no model, no tokens, no batch.

With S the log-probability of an answer, S' the reference's, |y| the number of its scored tokens, w the chosen and l the
rejected answer:

    h = S - S'      D = h_w - h_l      a(S) = S / |y|      s = the logistic function

Every loss is a function (pairs, options) -> [pairs], and a method is a weighted sum of them (`combine`), as MPO has it
(arXiv 2411.10442). `aot` couples the pairs of a whole step by sorting, so it has two passes: `couple` gives each pair's
value and the derivative of each sequence, from all pairs of the step, before its first gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid, relu

from swift.config.preference import SORTED
from swift.objectives.preference_options import PreferenceOptions


@dataclass
class Side:
    """One answer of each pair, [pairs] each.

    Attributes:
        logps: log-probability under the policy, with a gradient. reference: under the reference; None without one.
        lengths: scored tokens (the sum of their weights).
    """

    logps: torch.Tensor
    reference: torch.Tensor | None
    lengths: torch.Tensor

    @property
    def ratio(self) -> torch.Tensor:
        """h: the log-ratio to the reference, or the log-probability itself without one."""
        return self.logps if self.reference is None else self.logps - self.reference

    @property
    def average(self) -> torch.Tensor:
        """The mean log-probability of a token."""
        return self.logps / self.lengths


@dataclass
class Pairs:
    """The pairs of a micro-batch, or of a step.

    Attributes:
        nll: minus the log-probability of the chosen answers' tokens, [pairs].
        nll_scale: pairs of the step / chosen tokens of the step, which makes a mean over tokens of sums over pairs.
        delta: BCO's running mean of rewards.
    """

    chosen: Side
    rejected: Side
    nll: torch.Tensor
    nll_scale: float = 0.0
    delta: float = 0.0

    @property
    def difference(self) -> torch.Tensor:
        """D."""
        return self.chosen.ratio - self.rejected.ratio


PairLoss = Callable[[Pairs, PreferenceOptions], torch.Tensor]


def _smoothed(logit: torch.Tensor, smoothing: float) -> torch.Tensor:
    """-(1 - e) log s(logit) - e log s(-logit): a share e of the labels is thought to be swapped."""
    loss = -logsigmoid(logit)
    return loss if not smoothing else (1 - smoothing) * loss - smoothing * logsigmoid(-logit)


def f_ratio(ratio: torch.Tensor, options: PreferenceOptions) -> torch.Tensor:
    """f'(e^h), up to a constant that drops out of differences: the reward of a policy held near the reference by an
    f-divergence (arXiv 2309.16240, table 1). reverse_kl: h; forward_kl: 1 - e^-h; js_divergence: log 2 + log s(h);
    alpha_divergence: (e^((a - 1) h) - 1) / (a - 1), which is reverse KL at a = 1 and forward KL at a = 0."""
    match options.f_divergence:
        case "reverse_kl":
            return ratio
        case "forward_kl":
            return -torch.expm1(-ratio)
        case "js_divergence":
            return logsigmoid(ratio) + torch.log(torch.full_like(ratio, 2.0))
        case "alpha_divergence":
            exponent = options.divergence_exponent
            return torch.expm1(exponent * ratio) / exponent if exponent else ratio
        case other:
            raise ValueError(f"no divergence of the name {other!r}")


def _logit(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """beta times the difference of rewards under the divergence that was chosen."""
    return options.beta * (f_ratio(pairs.chosen.ratio, options) - f_ratio(pairs.rejected.ratio, options))


def sigmoid(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """DPO, -log s(beta D): arXiv 2305.18290, eq. 7; with smoothing the conservative DPO of its authors' note (cDPO)."""
    return _smoothed(_logit(pairs, options), options.smoothing_of("sigmoid"))


def hinge(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """max(0, 1 - beta D): SLiC-HF, arXiv 2305.10425, as a loss on ratios in RSO, arXiv 2309.06657, section 3."""
    return relu(1 - _logit(pairs, options))


def ipo(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """(a(h_w) - a(h_l) - 1/(2 beta))^2: IPO, arXiv 2310.12036, eq. 17, with mean log-ratios of a token."""
    chosen, rejected = pairs.chosen, pairs.rejected
    return (chosen.ratio / chosen.lengths - rejected.ratio / rejected.lengths - 1 / (2 * options.beta)) ** 2


def exo_pair(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """KL((s(beta D), s(-beta D)) || (1 - e, e)): EXO, arXiv 2402.00856, eq. 16."""
    logit, smoothing = _logit(pairs, options), options.smoothing_of("exo_pair")
    certain = torch.tensor([1 - smoothing, smoothing], dtype=logit.dtype, device=logit.device).log()
    loss = torch.zeros_like(logit)
    for sign, log_label in zip((1, -1), certain, strict=True):
        log_policy = logsigmoid(sign * logit)
        loss = loss + log_policy.exp() * (log_policy - log_label)
    return loss


def nca_pair(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """-log s(beta h_w) - 1/2 log s(-beta h_w) - 1/2 log s(-beta h_l): NCA, arXiv 2402.05369, for pairs."""
    chosen, rejected = options.beta * pairs.chosen.ratio, options.beta * pairs.rejected.ratio
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


def robust(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """(-(1 - e) log s(beta D) + e log s(-beta D)) / (1 - 2 e): robust DPO, arXiv 2403.00409, eq. 12."""
    logit, smoothing = _logit(pairs, options), options.smoothing_of("robust")
    return (-(1 - smoothing) * logsigmoid(logit) + smoothing * logsigmoid(-logit)) / (1 - 2 * smoothing)


def bco_pair(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """-log s(beta h_w - d) - log s(-(beta h_l - d)), d a running mean of rewards: BCO, arXiv 2404.04656, eq. 13."""
    delta = 0.0 if options.compat == "trl" else pairs.delta
    return -logsigmoid(options.beta * pairs.chosen.ratio - delta) - logsigmoid(
        delta - options.beta * pairs.rejected.ratio
    )


def sppo_hard(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """(h_w - 1/(2 beta))^2 + (h_l + 1/(2 beta))^2: SPPO, arXiv 2405.00675, with win probabilities 1 and 0."""
    target = 1 / (2 * options.beta)
    return (pairs.chosen.ratio - target) ** 2 + (pairs.rejected.ratio + target) ** 2


def apo_zero(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """1 - s(beta h_w) + s(beta h_l): APO-zero, arXiv 2408.06266; the chosen answer goes up, the rejected one down."""
    return 1 - torch.sigmoid(options.beta * pairs.chosen.ratio) + torch.sigmoid(options.beta * pairs.rejected.ratio)


def apo_down(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """s(beta h_w) + 1 - s(beta D): APO-down, arXiv 2408.06266; both go down, the rejected answer more."""
    return torch.sigmoid(options.beta * pairs.chosen.ratio) + 1 - torch.sigmoid(options.beta * pairs.difference)


def discopop(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """(1 - g) (-log s(beta D)) + g e^(-beta D), g = s(beta D / tau): DiscoPOP (LRML), arXiv 2406.08414."""
    logit = _logit(pairs, options)
    gate = torch.sigmoid(logit / options.discopop_tau)
    return (1 - gate) * -logsigmoid(logit) + gate * torch.exp(-logit)


def sigmoid_norm(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """-log s(beta (a(h_w) - a(h_l))): length-normalised DPO, Tulu 3, arXiv 2411.15124, eq. 6, where beta is 5."""
    chosen, rejected = pairs.chosen, pairs.rejected
    logit = options.beta * (chosen.ratio / chosen.lengths - rejected.ratio / rejected.lengths)
    return _smoothed(logit, options.smoothing_of("sigmoid_norm"))


def sft(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """The chosen answers' negative log-likelihood as a mean over the step's chosen tokens: RPO, arXiv 2405.16436; MPO,
    arXiv 2411.10442."""
    return pairs.nll * pairs.nll_scale


def simpo(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """-log s(beta (a(S_w) - a(S_l)) - gamma): SimPO, arXiv 2405.14734, eq. 6.

    With alpha, the reward of AlphaPO, arXiv 2501.03884, (1 - e^(-alpha a(S))) / alpha, takes the place of a(S), which
    is its limit for alpha to 0.
    """
    alpha, rewards = options.alphapo_alpha, [pairs.chosen.average, pairs.rejected.average]
    if alpha:
        rewards = [-torch.expm1(-alpha * average) / alpha for average in rewards]
    logit = options.beta * (rewards[0] - rewards[1]) - options.simpo_gamma
    return _smoothed(logit, options.label_smoothing)


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """log(1 - e^x) for x < 0, exact near 0 and far from it (Mächler 2012, eq. 7); its gradient is finite below 0."""
    near = x > -0.6931471805599453
    safe_near, safe_far = torch.where(near, x, -1.0), torch.where(near, -1.0, x)  # so that no gradient becomes NaN
    return torch.where(near, torch.log(-torch.expm1(safe_near)), torch.log1p(-torch.exp(safe_far)))


def orpo(pairs: Pairs, options: PreferenceOptions) -> torch.Tensor:
    """-beta log s(od_w - od_l), od = a(S) - log(1 - e^a(S)): the odds ratio of ORPO, arXiv 2403.07691, eq. 7; beta is
    the paper's lambda. The likelihood that goes with it is `sft` of weight 1."""
    # an answer that is certain has infinite odds: take the largest number below 0 instead
    tiny = torch.finfo(pairs.chosen.logps.dtype).eps
    chosen, rejected = (side.average.clamp_max(-tiny) for side in (pairs.chosen, pairs.rejected))
    odds = (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))
    return -options.beta * logsigmoid(odds)


LOSSES: dict[str, PairLoss] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "robust": robust,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "sigmoid_norm": sigmoid_norm,
    "sft": sft,
    "simpo": simpo,
    "alphapo": simpo,
    "orpo": orpo,
}


def combine(pairs: Pairs, options: PreferenceOptions, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The weighted sum of the losses of each pair, [pairs], but for those that sort.

    Args:
        weights: of the pairs, without a gradient (WPO); the likelihood terms aren't weighted.
    """
    loss = torch.zeros_like(pairs.nll)
    for name, weight in options.terms:
        if name not in SORTED:
            term = LOSSES[name](pairs, options)
            loss = loss + weight * (term if weights is None or name == "sft" else term * weights)
    return loss


class Coupling(NamedTuple):
    """What sorting losses give, [pairs] each: the pair's value; the value's derivative with respect to both S."""

    value: torch.Tensor
    chosen: torch.Tensor
    rejected: torch.Tensor


def couple(pairs: Pairs, options: PreferenceOptions) -> Coupling:
    """The losses that sort: AOT, arXiv 2406.05882, over all pairs that are given, which should be a whole step's.

    aot: sort(S_w - S_l) against sort(S'_w - S'_l); aot_unpaired: sort(h_w) against sort(h_l); both in the smoothed
    logistic form of beta times the difference. The value of a place in the order counts for the pair whose policy
    difference (`aot`) or chosen answer (`aot_unpaired`) has that place.

    Returns:
        Without gradients. Σ value is the loss; Σ chosen * S_w + rejected * S_l has its gradient.
    """
    chosen, rejected = pairs.chosen.logps.detach(), pairs.rejected.logps.detach()
    value, to_chosen, to_rejected = (torch.zeros_like(chosen) for _ in range(3))
    for name, weight in options.terms:
        if name == "aot":
            better, above = (chosen - rejected).sort(stable=True)
            worse, below = _reference_difference(pairs).sort().values, above
        elif name == "aot_unpaired":
            better, above = pairs.chosen.ratio.detach().sort(stable=True)
            worse, below = pairs.rejected.ratio.detach().sort(stable=True)
        else:
            continue
        smoothing = options.smoothing_of(name)
        logit = options.beta * (better - worse)
        slope = weight * options.beta * ((1 - smoothing) * -torch.sigmoid(-logit) + smoothing * torch.sigmoid(logit))
        value.index_add_(0, above, weight * _smoothed(logit, smoothing))
        to_chosen.index_add_(0, above, slope)
        to_rejected.index_add_(0, below, -slope)
    return Coupling(value, to_chosen, to_rejected)


def _reference_difference(pairs: Pairs) -> torch.Tensor:
    chosen, rejected = pairs.chosen.reference, pairs.rejected.reference
    return torch.zeros_like(pairs.nll) if chosen is None or rejected is None else chosen - rejected


def kto(ratio: torch.Tensor, desirable: torch.Tensor, z0: float, options: PreferenceOptions) -> torch.Tensor:
    """KTO, arXiv 2402.01306, eq. 8: weight_D (1 - s(beta (h - z0))) or weight_U (1 - s(beta (z0 - h))).

    Args:
        ratio: h, [rows]; desirable: bool [rows]; z0: the reference point, of the whole step.
    """
    signed = torch.where(desirable, ratio - z0, z0 - ratio)
    desired, undesired = (torch.full_like(ratio, w) for w in (options.desirable_weight, options.undesirable_weight))
    return torch.where(desirable, desired, undesired) * (1 - torch.sigmoid(options.beta * signed))


def apo_zero_unpaired(
    ratio: torch.Tensor, desirable: torch.Tensor, z0: float, options: PreferenceOptions
) -> torch.Tensor:
    """APO-zero of single rows, arXiv 2408.06266: `kto` with a reference point of 0."""
    return kto(ratio, desirable, 0.0, options)


RowLoss = Callable[[torch.Tensor, torch.Tensor, float, PreferenceOptions], torch.Tensor]
ROW_LOSSES: dict[str, RowLoss] = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}


def reward_model(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor, centring: float = 0.0
) -> torch.Tensor:
    """-log s(r_w - r_l - margin) + c (r_w + r_l)^2, [pairs]: InstructGPT, arXiv 2203.02155, eq. 1; the margin is Llama
    2's, arXiv 2307.09288, eq. 2; centring arXiv 2312.09244, eq. 2."""
    loss = -logsigmoid(chosen - rejected - margin)
    return loss if not centring else loss + centring * (chosen + rejected) ** 2
