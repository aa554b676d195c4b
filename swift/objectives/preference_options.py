"""The settings of preference losses, with everything left open settled, and what contradicts itself.

`compat` names the tool whose numbers are wanted where they differ: `docs/algorithms.md` has the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swift.config.preference import LOSSES, OF_DIFFERENCE, SMOOTHED, SORTED
from swift.core.errors import UsageError

DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
KINDS: dict[str, tuple[str, ...]] = {**LOSSES, "orpo": ("orpo",), "rm": ("rm",)}


@dataclass(frozen=True)
class PreferenceOptions:
    """Settings of a preference loss; each is the flag of the same name unless said otherwise.

    Attributes:
        kind: method, a key of `KINDS` (--rlhf_type); loss_types: its losses; loss_weights: of each, or empty for 1.
        rpo_alpha, cpo_alpha: weight of the chosen answers' likelihood per token in dpo; in cpo and simpo.
        f_divergence, f_alpha: --f_divergence_type, --f_alpha_divergence_coef.
        wpo: --use_weighting. center: --center_rewards_coefficient.
    """

    kind: str = "dpo"
    loss_types: tuple[str, ...] = ("sigmoid",)
    loss_weights: tuple[float, ...] = ()
    beta: float = 0.1
    label_smoothing: float = 0.0
    ld_alpha: float | None = None
    discopop_tau: float = 0.05
    f_divergence: str = "reverse_kl"
    f_alpha: float = 1.0
    simpo_gamma: float = 1.0
    cpo_alpha: float = 0.0
    alphapo_alpha: float = 0.0
    rpo_alpha: float = 0.0
    reference_free: bool = False
    wpo: bool = False
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    center: float = 0.0
    compat: str = "ours"

    @property
    def terms(self) -> Iterator[tuple[str, float]]:
        """Name and weight of every loss of a pair, the likelihood that the method adds among them."""
        weights = self.loss_weights or (1.0,) * len(self.loss_types)
        yield from zip(self.loss_types, weights, strict=True)
        likelihood = {"dpo": self.rpo_alpha, "orpo": 1.0, "cpo": self.cpo_alpha, "simpo": self.cpo_alpha}
        if likelihood.get(self.kind):
            yield "sft", likelihood[self.kind]

    @property
    def uses_likelihood(self) -> bool:
        return any(name == "sft" for name, _ in self.terms)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference's log-probabilities are part of the loss."""
        return self.kind in ("dpo", "kto") and not self.reference_free

    @property
    def sorts(self) -> bool:
        """Whether a loss couples the pairs of a step."""
        return any(name in SORTED for name in self.loss_types)

    @property
    def divergence_exponent(self) -> float:
        """What alpha_divergence has in e^(x h): a - 1; ms-swift counts a from the other end."""
        return -self.f_alpha if self.compat == "ms-swift" else self.f_alpha - 1

    def smoothing_of(self, loss: str) -> float:
        """Label smoothing of a loss: TRL leaves DPO's sigmoid without, ms-swift never leaves EXO without."""
        if loss == "sigmoid" and self.kind == "dpo" and self.compat == "trl":
            return 0.0
        if loss == "exo_pair" and self.compat == "ms-swift":
            return self.label_smoothing or 1e-3
        return self.label_smoothing

    def check(self) -> PreferenceOptions:
        """Itself, if it is in order.

        Raises:
            UsageError: something contradicts itself or would do nothing; `where` names the flag.
        """
        for wrong, flag, message, fix in self._faults():
            if wrong:
                raise UsageError(message, where=f"--{flag}", fix=fix)
        return self

    def _faults(self) -> Iterator[tuple[bool, str, str, str]]:
        """(whether it is so, flag, message, fix)."""
        names, known = set(self.loss_types), KINDS.get(self.kind, ())
        yield not known, "rlhf_type", f"{self.kind} is no method with a preference loss", f"one of {', '.join(KINDS)}"
        foreign = ", ".join(sorted(names - set(known)))
        yield bool(foreign) or not names, "loss_type", f"{self.kind} has no loss {foreign}", f"use {', '.join(known)}"
        counts = len(self.loss_types), len(self.loss_weights)
        message = f"{counts[1]} weight(s) for {counts[0]} loss(es)"
        yield counts[1] not in (0, counts[0]), "loss_weights", message, "give one for each --loss_type"
        yield self.kind != "rm" and self.beta <= 0, "beta", f"beta is {self.beta}, and must be above 0", "--beta 0.1"
        smoothing = self.label_smoothing
        message = f"label_smoothing is {smoothing}: at least half of the labels would be wrong"
        yield not 0 <= smoothing < 0.5, "label_smoothing", message, "a number from 0 to below 0.5"
        message = "exo_pair compares with how sure the labels are, and with label_smoothing 0 they are certain"
        certain = "exo_pair" in names and not self.smoothing_of("exo_pair")
        yield certain, "label_smoothing", message, "--label_smoothing 0.001"
        idle = bool(smoothing) and not names & set(SMOOTHED)
        message = f"no loss of {', '.join(self.loss_types)} has label smoothing"
        yield idle, "label_smoothing", message, f"leave it out, or use one of {', '.join(SMOOTHED)}"
        bad = self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1
        yield bad, "ld_alpha", f"ld_alpha is {self.ld_alpha}", "a number from 0 to 1"
        yield self.discopop_tau <= 0, "discopop_tau", f"discopop_tau is {self.discopop_tau}", "a number above 0"
        unknown = self.f_divergence not in DIVERGENCES
        yield unknown, "f_divergence_type", f"no divergence {self.f_divergence}", f"one of {', '.join(DIVERGENCES)}"
        others = ", ".join(sorted(names - set(OF_DIFFERENCE)))
        message = f"an f-divergence has no meaning for {others}, which is no function of the difference of rewards"
        fix = f"leave it out, or use {', '.join(OF_DIFFERENCE)}"
        yield self.f_divergence != "reverse_kl" and bool(others), "f_divergence_type", message, fix
        message = "WPO weighs each pair, and a loss that sorts couples them"
        yield self.wpo and self.sorts, "use_weighting", message, "leave it out, or use another --loss_type"
        message = f"compat is {self.compat}"
        yield self.compat not in ("ours", "trl", "ms-swift"), "compat", message, "ours, trl or ms-swift"
