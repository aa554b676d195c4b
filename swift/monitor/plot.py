"""loss.png: training loss (raw and smoothed), evaluation loss, learning rate and gradient norm over the steps."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from swift.core.files import write_atomic
from swift.monitor.history import History


def smooth(values: list[float], weight: float | None = None) -> list[float]:
    """Exponential moving average with the start-up bias divided out (Adam's correction), so it starts at the data.

    Args:
        values: the curve.
        weight: share of the past in each value; default: about a twentieth of the curve is averaged, nothing when it is
            shorter than 20 points. More would lag visibly behind.
    """
    if weight is None:
        weight = max(0.0, 1 - 20 / max(1, len(values)))
    result, average = [], 0.0
    for index, value in enumerate(values, 1):
        average = weight * average + (1 - weight) * value
        result.append(average / (1 - weight**index))
    return result


def write_loss_plot(history: History, path: Path, *, title: str = "") -> bool:
    """Draw the curves of `history` to `path`; returns False when no loss was logged.

    A file of that name goes then: it would be another run's.
    """
    steps, losses = history.series("loss")
    eval_steps, eval_losses = history.series("eval_loss")
    if not losses and not eval_losses:
        path.unlink(missing_ok=True)
        return False
    from matplotlib.figure import Figure  # half a second: only at the end of a run

    figure = Figure(figsize=(8, 5.6), dpi=110, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    if losses:
        smoothed = smooth(losses)
        if smoothed != losses:
            upper.plot(steps, losses, color="tab:blue", alpha=0.35, linewidth=1)
        label = "loss" if smoothed == losses else "loss (smoothed)"
        upper.plot(
            steps, smoothed, color="tab:blue", linewidth=1.8, marker="." if len(losses) < 40 else "", label=label
        )
    if eval_losses:
        upper.plot(eval_steps, eval_losses, color="tab:orange", linewidth=1.8, marker="o", label="evaluation loss")
    upper.set_ylabel("loss")
    upper.grid(alpha=0.3)
    upper.legend(frameon=False)
    if title:
        upper.set_title(title, fontsize=10, parse_math=False)
    rate_steps, rates = history.series("learning_rate")
    norm_steps, norms = history.series("grad_norm")
    lower.plot(rate_steps, rates, color="tab:green", linewidth=1.4)
    lower.set_ylabel("learning rate", color="tab:green")
    lower.set_xlabel("step")
    lower.grid(alpha=0.3)
    if norms:
        right = lower.twinx()
        right.plot(norm_steps, norms, color="tab:red", alpha=0.6, linewidth=1)
        right.set_ylabel("grad norm", color="tab:red")
    save_figure(figure, path)
    return True


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure as a PNG, whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    image = io.BytesIO()
    FigureCanvasAgg(figure).print_png(image)
    write_atomic(path, image.getvalue())
