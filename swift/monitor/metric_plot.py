"""metrics.png: what was logged beside the loss, over the steps; one small plot for each group of metrics.

Which metrics share a plot is said by the table below, by names alone, whatever method logs them. What the table
doesn't know is drawn too: names that begin alike, as `f1/person` and `f1/place` or `recall@1` and `recall@5`, share a
plot (that of the name they begin with, if the table has it), any other has its own. An evaluation's metric is drawn
where the one of the same name in training is.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swift.monitor.history import History
from swift.monitor.plot import save_figure, smooth

FILE_NAME = "metrics.png"
MOST_CURVES = 10  # in one plot; more can't be told apart

# title -> names, in the order of drawing
GROUPS: dict[str, tuple[str, ...]] = {
    "rewards of chosen and rejected": ("rewards/chosen", "rewards/rejected", "rewards/mean"),
    "reward margin": ("rewards/margins",),
    "reward accuracy": ("rewards/accuracies",),
    "log-probability of answers": ("logps/chosen", "logps/rejected", "logps/ref_chosen", "logps/ref_rejected"),
    "KL to the reference": ("kl", "kto_z0"),
    "running mean of rewards": ("bco_delta",),
    "divergence to the teacher": ("divergence",),
    "negative log-likelihood": ("nll", "teacher_nll", "token_loss"),
    "entropy": ("student_entropy",),
    "agreement with the teacher": ("agreement", "teacher_topk_mass"),
    "accuracy": ("accuracy", "token_accuracy"),
    "F1": ("f1_macro", "f1_micro", "f1_weighted"),
    "precision and recall": ("precision_macro", "recall_macro"),
    "area under the ROC curve": ("auc",),
    "error": ("absolute_error", "mae", "mse"),
    "correlation": ("pearson", "spearman", "cosine_pearson", "cosine_spearman", "r2"),
    "ranking": ("mrr", "ndcg"),
    "perplexity": ("perplexity",),
}

# in loss.png, or about the run and not about the model
_ELSEWHERE = re.compile(
    r"loss|learning_rate|grad_norm|epoch|step|time|memory_gib|num_tokens|tokens_per_second|seconds_.*|sent_mib/.*"
)


@dataclass(frozen=True)
class Panel:
    """One plot: its title and the metrics in it, without `eval_`."""

    title: str
    names: tuple[str, ...]


def find_panels(history: History) -> list[Panel]:
    """The plots for what was logged: the table's in its order, then others in the order of their first line."""
    logged: dict[str, None] = {}
    for record in history.records:
        if "event" not in record:
            logged.update((name.removeprefix("eval_"), None) for name, value in record.items() if _drawable(value))
    titles = {name: title for title, members in GROUPS.items() for name in members}
    found: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in sorted(logged, key=lambda name: list(titles).index(name) if name in titles else len(titles)):
        if not _ELSEWHERE.fullmatch(name):
            family = _family(name)
            found.setdefault(titles.get(name) or titles.get(family) or family, []).append(name)
    return [Panel(title, tuple(members)) for title, members in found.items() if members]


def _drawable(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _family(name: str) -> str:
    """The part that names share: up to a slash, an @, or a number at the end."""
    return re.split(r"[/@]|_\d+$", name, maxsplit=1)[0] or name


def metric_figure(history: History, panels: list[Panel]) -> Any:
    """A matplotlib figure of the plots, two side by side."""
    from matplotlib.figure import Figure  # half a second: only at the end of a run

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 2.7 * rows), dpi=110, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        _draw(axis, panel, history)
    for axis in axes[len(panels) :]:
        axis.remove()
    return figure


def _draw(axis: Any, panel: Panel, history: History) -> None:
    """The curves of a plot: training smoothed over its raw values, evaluation dashed, a reference's dotted.

    A reference's curve has the colour of the model's own, an evaluation's that of the training's.
    """
    shown = panel.names[:MOST_CURVES]
    hidden = len(panel.names) - len(shown)
    owners = list(dict.fromkeys(name.replace("/ref_", "/") for name in shown))
    handles, labels = [], []
    for name in shown:
        color = f"C{owners.index(name.replace('/ref_', '/')) % 10}"
        steps, values = history.series(name)
        if values:
            smoothed = smooth(values)
            if smoothed != values:
                axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
            style = ":" if "/ref_" in name else "-"
            marker = "." if len(values) == 1 else ""
            handles += axis.plot(steps, smoothed, style, color=color, linewidth=1.5, marker=marker)
            labels.append(name)
        steps, values = history.series(f"eval_{name}")
        if values:
            handles += axis.plot(steps, values, "--", color=color, linewidth=1.2, marker="o", markersize=3)
            labels.append(f"eval_{name}")
    more = f" (and {hidden} more in logging.jsonl)" if hidden else ""
    axis.set_title(panel.title + more, fontsize=9, parse_math=False)
    axis.tick_params(labelsize=7)
    axis.grid(alpha=0.3)
    for words in axis.legend(handles, labels, frameon=False, fontsize=6).get_texts():
        words.set_parse_math(False)  # names of classes may have a $


def write_metric_plot(history: History, path: Path) -> list[str]:
    """Draw all plots to `path`; returns their titles.

    Where there is nothing to draw, a file of that name goes: it would be another run's.
    """
    panels = find_panels(history)
    if not panels:
        path.unlink(missing_ok=True)
        return []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a class may be named in any script
        save_figure(metric_figure(history, panels), path)
    return [panel.title for panel in panels]
