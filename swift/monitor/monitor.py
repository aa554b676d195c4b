"""The monitor that a trainer talks to, and the one that does nothing (ranks above 0).

It knows nothing about models or training: it is handed numbers and words, and spreads them over its sinks.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from swift.config.training import MonitorConfig
from swift.core.version import __version__
from swift.monitor import text
from swift.monitor.console import Console, Pace, make_console
from swift.monitor.history import History
from swift.monitor.tensorboard import EventWriter
from swift.monitor.watch import make_watches

_SEVERITY = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class Monitor:
    """What the trainer calls. This base class is the null monitor: it accepts everything and shows nothing."""

    def resume_at(self, step: int, previous_run: Path | None = None) -> None:
        """Call before `start` on resume: the history up to `step` is kept, later lines are cut.

        The cut happens in `start`, since until then the resume may be refused.

        Args:
            step: optimizer step of the checkpoint.
            previous_run: the resumed run's folder if this run writes to another one.
        """

    def start(self, plan: dict[str, Any]) -> None:
        """The run is about to begin.

        Args:
            plan: recorded whole. Shown if present: model, device, precision, trainable (words), examples,
                tokens_per_epoch, total_steps, steps_per_epoch, batch (words), run_dir, notes (list of words).
        """

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record measurements: loss, learning_rate, grad_norm, tokens_per_second, epoch, memory_gib, eval_*, ..."""

    def progress(self, step: int, metrics: dict[str, float]) -> None:
        """Every step: move the live line. Nothing is recorded."""

    def event(self, kind: str, message: str, **data: Any) -> None:
        """Something happened: "checkpoint", "warning", "error", "debug", or any other kind (shown as information)."""

    def finish(self, summary: dict[str, Any]) -> None:
        """The run is over: write the curves and the report, print the summary, close everything.

        Args:
            summary: recorded whole. Shown if present: status (finished, interrupted, failed), steps, seconds, loss,
                best_metric (words), tokens_per_second, memory_gib, last_checkpoint, best_checkpoint, next (commands).
        """

    def close(self) -> None:
        """Give the terminal back and close the files; for runs that end by an error. `finish` does it too."""


class RunMonitor(Monitor):
    """All sinks of the process that speaks (rank 0)."""

    def __init__(self, config: MonitorConfig, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.history = History(run_dir)
        self._config = config
        self._severity = _SEVERITY[config.log_level]
        self._console: Console = make_console(live=not config.disable_tqdm and self._severity <= _SEVERITY["info"])
        self._tensorboard: EventWriter | None = None
        self._resumed_step: int | None = None
        self._previous_run: Path | None = None
        self._step = 0
        self._plan: dict[str, Any] = {}
        self._pace: Pace | None = None
        self._watches = make_watches()
        self._logged: dict[str, float] = {}  # the newest of each metric, for the live line
        self._early: list[dict[str, Any]] = []  # events before `start`, when it isn't known yet whether we resume

    def resume_at(self, step: int, previous_run: Path | None = None) -> None:
        self._resumed_step = self._step = step
        self._previous_run = previous_run

    def start(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        total = int(plan.get("total_steps", 0))
        if self._resumed_step is not None:
            self.history.resume_at(self._resumed_step, self._previous_run)
            for record in self.history.records:
                if "event" not in record:
                    self._warnings(record.get("step", 0), record)  # what they had to say is in the history
        kind = "start" if self._resumed_step is None else "resume"
        self._record({"event": kind, "version": __version__, **plan})
        for record in self._early:
            self._record(record)
        if "tensorboard" in self._config.report_to:
            folder = Path(self._config.logging_dir) if self._config.logging_dir else self.run_dir / "runs"
            first = None if self._resumed_step is None else self._resumed_step + 1
            self._tensorboard = EventWriter(folder, first_step=first)
        for line in header_lines(plan, self._resumed_step):
            self._say(line)
        self._pace = Pace(total, self._step)
        if self._severity <= _SEVERITY["info"]:
            self._console.begin(total, self._step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._step = step
        self._record({**metrics})
        if self._tensorboard is not None:
            self._tensorboard.add(step, {_tag(name): value for name, value in metrics.items() if _is_number(value)})
        words = [f"step {step}/{self._plan.get('total_steps') or '?'}", *text.metric_words(metrics)]
        if self._pace is not None and "loss" in metrics:
            words.append(f"eta {text.duration(self._pace.eta_s())}")
        self._say("  ".join(words))
        self._logged |= metrics
        for warning in self._warnings(step, metrics):
            self.event("warning", warning)

    def _warnings(self, step: int, metrics: dict[str, Any]) -> list[str]:
        """What the watches say of a logged line."""
        return [warning for watch in self._watches if (warning := watch.log(step, metrics)) is not None]

    def progress(self, step: int, metrics: dict[str, float]) -> None:
        self._step = step
        if self._pace is not None:
            self._pace.mark(step)
        self._console.progress(step, {**self._logged, **metrics})

    def event(self, kind: str, message: str, **data: Any) -> None:
        record = {"event": kind, "message": message, **data}
        if self._pace is None:
            self._early.append(record)
        else:
            self._record(record)
        prefix = f"{kind}: " if kind in ("warning", "error") else ""
        self._say(prefix + message, _SEVERITY.get(kind, _SEVERITY["info"]))

    def finish(self, summary: dict[str, Any]) -> None:
        self._record({"event": "finish", **summary})
        self.close()
        from swift.monitor import metric_plot
        from swift.monitor.plot import write_loss_plot
        from swift.monitor.report import write_report

        write_loss_plot(self.history, self.run_dir / "loss.png", title=str(self._plan.get("model", "")))
        titles = metric_plot.write_metric_plot(self.history, self.run_dir / metric_plot.FILE_NAME)
        write_report(self.history, self.run_dir, plan=self._plan, summary=summary, plots=titles)
        for line in summary_lines(summary, self.history, self.run_dir):
            self._say(line)

    def close(self) -> None:
        self._console.close()
        self.history.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def _record(self, record: dict[str, Any]) -> None:
        self.history.write({"step": self._step, "time": round(time.time(), 3), **record})

    def _say(self, words: str, severity: int = _SEVERITY["info"]) -> None:
        if severity >= self._severity:
            self._console.line(words)


def build_monitor(config: MonitorConfig, run_dir: Path, *, rank: int) -> Monitor:
    """The monitor of this process: every sink on rank 0, the silent one elsewhere."""
    return RunMonitor(config, Path(run_dir)) if rank == 0 else Monitor()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _tag(name: str) -> str:
    """TensorBoard groups by the part before the slash."""
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


def header_lines(plan: dict[str, Any], resumed_step: int | None) -> list[str]:
    """The few lines that say what is about to happen."""
    where = " on ".join(str(plan[key]) for key in ("precision", "device") if plan.get(key))
    lines = [" · ".join(filter(None, [f"swift {__version__}", str(plan.get("model", "")), where]))]
    if plan.get("trainable"):
        lines.append(f"trains  {plan['trainable']}")
    data, about = [], "about " if plan.get("estimated") else ""
    if plan.get("examples") is not None:
        data.append(f"{about}{plan['examples']} examples")
    if plan.get("tokens_per_epoch"):
        data.append(f"{about}{text.count(plan['tokens_per_epoch'])} tokens an epoch")
    if plan.get("batch"):
        data.append(str(plan["batch"]))
    if data:
        lines.append("data    " + " · ".join(data))
    if plan.get("total_steps"):
        steps = f"steps   {about}{plan['total_steps']}"
        if plan.get("steps_per_epoch"):
            steps += f" ({text.counted(number_of_epochs(plan), 'epoch')} of {plan['steps_per_epoch']})"
        if resumed_step is not None:
            steps += f" · goes on after step {resumed_step}"
        lines.append(steps)
    if plan.get("layout"):
        lines.append(f"spread  {plan['layout']}")
        lines.extend(f"        {line}" for line in plan.get("layout_table", "").splitlines())
    if plan.get("run_dir"):
        lines.append(f"run     {plan['run_dir']}")
    lines.extend(f"note    {note}" for note in plan.get("notes", ()))
    return lines


def number_of_epochs(plan: dict[str, Any]) -> str:
    """Epochs in `total_steps`, as words."""
    return text.number(round(plan["total_steps"] / plan["steps_per_epoch"], 2))


def summary_lines(summary: dict[str, Any], history: History, run_dir: Path) -> list[str]:
    """The few lines that say what came out and where it is."""
    status = summary.get("status", "finished")
    words = [f"{status}: {text.counted(summary['steps'], 'step')}" if "steps" in summary else "finished"]
    resumed_at = summary.get("resumed_at") or 0
    if resumed_at and resumed_at == summary.get("steps"):
        words[0] = (
            f"nothing left to do: all {resumed_at} steps are done (more: raise --num_train_epochs or --max_steps)"
        )
    elif resumed_at:
        more = summary["steps"] - resumed_at
        words[0] = f"{status}: {text.counted(more, 'more step')}, {summary['steps']} in all"
    if "seconds" in summary:
        words[0] += f" in {text.duration(summary['seconds'])}"
    _, losses = history.series("loss")
    if losses:
        words.append(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    if summary.get("best_metric"):
        words.append(f"best {summary['best_metric']}")
    if _is_number(summary.get("tokens_per_second")):
        words.append(f"{summary['tokens_per_second']:.0f} tok/s")
    if _is_number(summary.get("memory_gib")):
        words.append(f"peak {summary['memory_gib']:.1f} GiB")
    lines = [" · ".join(words)]
    saved = [record for record in history.records if record.get("event") == "checkpoint"]
    just_said = bool(saved) and saved[-1].get("step") == summary.get("steps")
    for key, label in (("last_checkpoint", "saved   "), ("best_checkpoint", "best    ")):
        if summary.get(key) and not (key == "last_checkpoint" and just_said):
            lines.append(f"{label}{summary[key]}")
    lines.append(f"report  {run_dir / 'report.html'} (also loss.png, metrics.png, logging.jsonl)")
    lines.extend(f"next    {command}" for command in summary.get("next", ()))
    return lines
