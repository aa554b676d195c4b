"""Rows and settings of preference runs for tests: pairs, labelled answers, every loss with flags that matter."""

from __future__ import annotations

from typing import Any

_WORDS = ["paris", "rain", "seven", "music", "river", "stone", "cloud", "green", "table", "window"]


def _said(start: int, count: int) -> str:
    return " ".join(_WORDS[(start + k) % len(_WORDS)] for k in range(count))


def pair_rows(count: int, *, margins: bool = False) -> list[dict[str, Any]]:
    """Conversations with a chosen and a rejected answer, of different lengths; every third has an earlier answer."""
    rows = []
    for i in range(count):
        earlier = [{"role": "user", "content": _said(i, 2)}, {"role": "assistant", "content": _said(i + 5, 3)}]
        asked = {"role": "user", "content": f"Question {i}: {_said(i, i % 7 + 1)}?"}
        chosen = {"role": "assistant", "content": f"Answer {i}: {_said(3 * i, i % 4 + 1)}"}
        row: dict[str, Any] = {
            "messages": [*(earlier if i % 3 == 2 else []), asked, chosen],
            "rejected_response": f"No, {_said(7 * i, 5 * i % 6 + 1)}",
        }
        rows.append(row | ({"margin": 0.25 * (i % 3)} if margins else {}))
    return rows


def labelled_rows(count: int) -> list[dict[str, Any]]:
    """Answers that are liked, but for every third."""
    return [{"messages": row["messages"], "label": i % 3 != 0} for i, row in enumerate(pair_rows(count))]


def rows_of(flags: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """What `--rlhf_type` takes."""
    method = flags.get("rlhf_type", "dpo")
    return labelled_rows(count) if method == "kto" else pair_rows(count, margins=method == "rm")


def _dpo(*names: str, **flags: Any) -> dict[str, Any]:
    return {"rlhf_type": "dpo", "loss_type": list(names), **flags}


LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": _dpo("sigmoid"),
    "cdpo": _dpo("sigmoid", label_smoothing=0.1),
    "hinge": _dpo("hinge"),
    "ipo": _dpo("ipo"),
    "exo_pair": _dpo("exo_pair", label_smoothing=0.05),
    "nca_pair": _dpo("nca_pair"),
    "robust": _dpo("robust", label_smoothing=0.1),
    "bco_pair": _dpo("bco_pair"),
    "sppo_hard": _dpo("sppo_hard"),
    "aot": _dpo("aot"),
    "aot_unpaired": _dpo("aot_unpaired", label_smoothing=0.1),
    "apo_zero": _dpo("apo_zero"),
    "apo_down": _dpo("apo_down"),
    "discopop": _dpo("discopop"),
    "sigmoid_norm": _dpo("sigmoid_norm", beta=5.0),
    "mpo": _dpo("sigmoid", "bco_pair", "sft", loss_weights=[0.8, 0.2, 1.0]),
    "rpo_alpha": _dpo("sigmoid", rpo_alpha=0.5),
    "ld_alpha": _dpo("sigmoid", ld_alpha=0.3),
    "rpo_ld": _dpo("sigmoid", rpo_alpha=0.5, ld_alpha=0.3),
    "forward_kl": _dpo("sigmoid", f_divergence_type="forward_kl"),
    "js_divergence": _dpo("sigmoid", f_divergence_type="js_divergence"),
    "alpha_divergence": _dpo("hinge", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.5),
    "wpo": _dpo("sigmoid", use_weighting=True),
    "reference_free": _dpo("sigmoid", reference_free=True),
    "tr_dpo": _dpo("sigmoid", reference="copy", sync_ref_model=True, ref_model_sync_steps=1),
    "orpo": {"rlhf_type": "orpo"},
    "orpo_turns": {"rlhf_type": "orpo", "loss_scale": "default"},
    "cpo": {"rlhf_type": "cpo"},
    "cpo_hinge": {"rlhf_type": "cpo", "loss_type": ["hinge"]},
    "cpo_ipo": {"rlhf_type": "cpo", "loss_type": ["ipo"], "cpo_alpha": 0.5},
    "simpo": {"rlhf_type": "simpo"},
    "simpo_nll": {"rlhf_type": "simpo", "cpo_alpha": 0.5, "label_smoothing": 0.1},
    "alphapo": {"rlhf_type": "simpo", "alphapo_alpha": 0.25},
    "kto": {"rlhf_type": "kto", "desirable_weight": 1.5},
    "apo_zero_unpaired": {"rlhf_type": "kto", "loss_type": ["apo_zero_unpaired"]},
    "rm": {"rlhf_type": "rm", "center_rewards_coefficient": 0.1},
}
