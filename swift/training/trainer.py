"""The training loop: six named phases a step, in one place.

    forward · backward     for each micro-batch
    clip                   gradients to a norm; a loss that isn't finite stops here, before any weight changes
    step                   the optimizer
    rescale                position and learning rate of the next step
    record                 log, evaluate, save

Every phase is a method of that name, is timed, and is shown to callbacks before and after. The loop knows nothing of
algorithms, adapters or parallelism: a strategy turns batches into loss terms and gradients, the loader gives batches,
the process group adds numbers up, the saver writes checkpoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from swift.checkpoint import RunState
from swift.core.errors import NumericsError, UsageError, did_you_mean
from swift.core.memory import return_free_memory
from swift.data.loading.batch import Batch
from swift.distributed import ProcessGroup
from swift.distributed.traffic import TRAFFIC
from swift.objectives import LossTerms
from swift.optim.optimizers import set_rate
from swift.training.diagnose import dump_nonfinite, peak_memory_gib
from swift.training.evaluate import evaluate, predict
from swift.training.stop import StopRequest
from swift.training.trainer_parts import TrainerParts

# Steps that may be left out one after another (not finite, or overflowing float16) before the run is called broken.
MOST_SKIPS_IN_A_ROW = 20

_SMALLER_IS_BETTER = ("loss", "perplexity", "mse", "mae", "absolute_error")  # endings of metrics' names

PHASES = ("forward", "backward", "clip", "step", "rescale", "record")


@dataclass
class FitResult:
    """How a run ended.

    Attributes:
        status: finished, early_stopped or interrupted.
        metrics: the last logged training metrics and evaluation metrics.
    """

    status: str
    state: RunState
    metrics: dict[str, float]
    last_checkpoint: Path | None
    seconds: float
    tokens_per_second: float


def phase(method: Callable[..., Any]) -> Callable[..., Any]:
    """Time a phase and show it to the callbacks."""
    name = method.__name__

    @wraps(method)
    def timed(self: Trainer, *args: Any) -> Any:
        for callback in self.parts.callbacks:
            callback.before_phase(self, name)
        start = time.perf_counter()
        result = method(self, *args)
        self.phase_seconds[name] += time.perf_counter() - start
        for callback in self.parts.callbacks:
            callback.after_phase(self, name)
        return result

    return timed


class Trainer:
    """Runs the loop over the parts it is given. `state` is the position; `fit` goes on from there."""

    def __init__(self, parts: TrainerParts, state: RunState | None = None) -> None:
        self.parts = parts
        self.state = state or RunState()
        self.scaler = parts.precision.scaler()
        self.strategy = parts.strategy
        self.device = next(parts.strategy.module.parameters()).device
        self.trained = [p for p in parts.strategy.module.parameters() if p.requires_grad]
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.grad_norm = 0.0
        self.last_checkpoint: Path | None = None
        self.metrics: dict[str, float] = {}
        self.status = "finished"
        self.stop_request = StopRequest()
        self._window = _Window(self.state.window)
        self._step_sums = _StepSums()
        self._saved_step: int | None = self.state.step or None
        self._recorded_long = False
        self._largest_batch = 0
        self.stepped = False

    def fit(self) -> FitResult:
        """Train until the last step, an early stop, or a signal; save; tell how it went."""
        try:
            return self._fit()
        finally:
            self.parts.loader.close()

    def _fit(self) -> FitResult:
        parts, state = self.parts, self.state
        started, first_step, first_tokens = time.perf_counter(), state.step, state.tokens
        parts.strategy.module.train()
        set_rate(parts.optimizer, parts.schedule.factor(state.step))
        if parts.evaluation.eval_on_start and state.step == 0 and parts.eval_examples is not None:
            self._evaluate()
        with StopRequest() as self.stop_request:
            while not self._ended() and self.status == "finished":
                self.train_step(parts.loader.next_step())
                if self._stop_asked() and not self._ended():
                    self.status = "interrupted"
            if self.status == "interrupted" and parts.checkpoint.save_only_model:
                self._saved_step = None  # what was saved at this step can't be resumed
            if parts.checkpoint.save_strategy != "no" or self.status == "interrupted":
                self._save()
            if parts.evaluation.load_best_model_at_end and self.status != "interrupted":
                parts.saver.load_best(self)
        if (rows := parts.loader.summary()) is not None:
            parts.monitor.event("data", rows["words"], ledger=rows["ledger"])
        seconds = time.perf_counter() - started
        return FitResult(
            status=self.status,
            state=state,
            metrics=self.metrics,
            last_checkpoint=self.last_checkpoint,
            seconds=seconds,
            tokens_per_second=(state.tokens - first_tokens) / seconds if state.step > first_step else 0.0,
        )

    def train_step(self, batches: list[Batch]) -> None:
        """One optimizer step over this rank's micro-batches."""
        parts = self.parts
        TRAFFIC.reset()
        sums = self._step_sums = _StepSums()
        if parts.look_ahead is not None:
            start = time.perf_counter()
            parts.look_ahead(self.strategy, batches, training=True)
            self.phase_seconds["forward"] += time.perf_counter() - start
        portions = self.strategy.prepare(batches)
        sums.batches = [batch for portion in portions for batch in portion]
        largest = max(batch.input_ids.numel() for batch in sums.batches)
        if largest > self._largest_batch and self.device.type == "cpu":
            return_free_memory()
        self._largest_batch = max(self._largest_batch, largest)
        weight = sum(batch.weight for batch in sums.batches)
        sums.weight = parts.group.sum([weight])[0] / self.strategy.copies
        for number, portion in enumerate(portions):
            last = number == len(portions) - 1
            self.backward(self.forward(portion, last), last)
        self.stepped = False
        if self.clip():
            self.step()
        self.rescale()
        self.record()

    def _stop_asked(self) -> bool:
        """Whether any rank was asked to stop: as of `clip`, or as of now after a phase that took long."""
        if self._recorded_long:
            return self.parts.group.sum([float(self.stop_request.requested is not None)])[0] > 0
        return self._step_sums.stop_asked

    def _to_loss(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """What is differentiated. Dividing by the global weight makes the step's gradient that of the mean over all its
        target tokens."""
        loss = loss_sum / self._step_sums.weight
        return self.scaler.scale(loss) if self.scaler is not None else loss

    @phase
    def forward(self, portion: list[Batch], last: bool) -> list[LossTerms]:
        """Loss terms of a portion of the micro-batches: of one, unless they run through a pipeline."""
        return self.strategy.forward(portion, self._to_loss, last)

    @phase
    def backward(self, terms: list[LossTerms], last: bool) -> None:
        """Add the portion's gradients; ranks exchange them with the last one."""
        for term in terms:
            self._step_sums.add(term)
        self.strategy.backward(terms, self._to_loss, last)

    @phase
    def clip(self) -> bool:
        """Clip the gradients' global norm. Returns whether the optimizer may step."""
        parts, sums = self.parts, self._step_sums
        if self.scaler is not None:
            self.scaler.unscale_(parts.optimizer)
        norm = self.strategy.clip(parts.training.max_grad_norm)
        self.grad_norm = 0.0 if norm is None else norm
        sums.reduce(parts.group, self.strategy.copies, self.stop_request)
        if math.isfinite(sums.loss) and (math.isfinite(self.grad_norm) or self.scaler is not None):
            return True
        self._nonfinite()
        return False

    def _nonfinite(self) -> None:
        parts, state, sums = self.parts, self.state, self._step_sums
        what = "loss" if not math.isfinite(sums.loss) else "gradient norm"
        gathered = parts.group.gather(sums.rows_by_finiteness())
        rows = [row for bad, _ in gathered for row in bad] or [row for _, fine in gathered for row in fine]
        folder = dump_nonfinite(parts.run_dir, state.step + 1, parts.group.rank, sums.batches, sums.batch_losses)
        parts.optimizer.zero_grad(set_to_none=True)
        self._count_skip()
        too_many = state.consecutive_skips >= MOST_SKIPS_IN_A_ROW
        if parts.training.on_nonfinite == "skip" and not too_many:
            parts.monitor.event("warning", f"step {state.step + 1}: {what} is not finite; step left out", rows=rows)
            return
        again = f" for the {state.consecutive_skips}th time in a row" if too_many else ""
        raise NumericsError(
            f"the {what} of step {state.step + 1} is not finite{again} (loss {sums.loss}, gradient norm "
            f"{self.grad_norm}); no weight was changed by it",
            where=f"rows {', '.join(rows[:8])}{' …' if len(rows) > 8 else ''}; batch dumped to {folder}",
            fix="look at these rows or lower --learning_rate"
            + ("" if too_many else "; --on_nonfinite skip leaves such steps out"),
        )

    def _count_skip(self) -> None:
        self.state.skipped_steps += 1
        self.state.consecutive_skips += 1

    @phase
    def step(self) -> None:
        """Change the weights."""
        self.stepped, norm = self.strategy.step(self.parts.optimizer, self.scaler)
        if norm is not None:
            self.grad_norm = norm
            if not self.stepped and self.parts.precision.compute != torch.float16:
                self._nonfinite()
                return
        if self.stepped:
            self.state.consecutive_skips = 0
            return
        self._count_skip()
        if self.state.consecutive_skips >= MOST_SKIPS_IN_A_ROW:
            raise NumericsError(
                f"the gradients overflowed float16 {self.state.consecutive_skips} times in a row, at every loss scale",
                where=f"step {self.state.step + 1}",
                fix="use --torch_dtype bfloat16 or float32, or lower --learning_rate",
            )

    @phase
    def rescale(self) -> None:
        """Move on: gradients dropped, position advanced, learning rate of the next step set."""
        parts, state, loader = self.parts, self.state, self.parts.loader
        parts.optimizer.zero_grad(set_to_none=True)
        self._step_sums.learning_rate = parts.optimizer.param_groups[0]["lr"]
        state.step += 1
        state.tokens += self._step_sums.tokens
        state.epoch, state.consumed = loader.epoch, loader.consumed
        set_rate(parts.optimizer, parts.schedule.factor(state.step))

    @phase
    def record(self) -> None:
        """Log, evaluate and save where the settings say so."""
        parts, state, sums = self.parts, self.state, self._step_sums
        self._window.add(sums)
        self._window.add_traffic(TRAFFIC.per_axis())
        epoch_ended = state.consumed == 0
        ending = self._ended()
        if math.isfinite(sums.loss):  # a step that was left out has nothing to show
            shown = {"loss": sums.loss / sums.weight, "learning_rate": sums.learning_rate, "grad_norm": self.grad_norm}
            parts.monitor.progress(state.step, shown)
        if self._window.sums and (state.step % parts.logging_steps == 0 or ending or state.step == 1):
            self._log()
        self._recorded_long = improved = False
        if self._due(parts.evaluation.eval_strategy, parts.evaluation.eval_steps, epoch_ended, ending):
            improved = self._evaluate()
            self._recorded_long = True
        saving = parts.checkpoint.save_strategy
        if self._due(saving, parts.checkpoint.save_steps, epoch_ended, False) or (improved and saving != "no"):
            self._save()
            self._recorded_long = True

    def _due(self, strategy: str | None, every: int | None, epoch_ended: bool, ending: bool) -> bool:
        if strategy == "epoch":
            return epoch_ended or ending
        return strategy == "steps" and (ending or (bool(every) and self.state.step % (every or 1) == 0))

    def _ended(self) -> bool:
        """Whether the last step was done."""
        return self.parts.length.reached(self.state)

    def _log(self) -> None:
        parts, state = self.parts, self.state
        values = self._window.metrics()
        values |= {
            "learning_rate": self._step_sums.learning_rate,
            "grad_norm": self.grad_norm,
            "epoch": round(parts.length.epochs_done(state), 4),
            "memory_gib": peak_memory_gib(self.device),
            "num_tokens": state.tokens,
            **parts.loader.metrics(),
        }
        values |= {f"seconds_{name}": seconds for name, seconds in self.phase_seconds.items() if seconds}
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self._window = _Window()
        self.metrics |= values
        parts.monitor.log(state.step, values)

    def _evaluate(self) -> bool:
        """Measure; returns whether it is the best so far."""
        parts, state = self.parts, self.state
        if parts.eval_examples is None:
            return False
        with parts.shared_weights():
            values = evaluate(
                parts.strategy,
                parts.eval_examples,
                parts.loader.layout,
                tokens_per_batch=parts.eval_tokens_per_batch,
                group=parts.group,
                look_ahead=parts.look_ahead,
                annotate=parts.annotate_eval,
            )
            if parts.metrics is not None:
                report = predict(parts, self.strategy)
                values |= {f"eval_{name}": value for name, value in report.numbers.items()}
                if report.words:
                    parts.monitor.event("evaluation", report.words, step=state.step)
        self.metrics |= values
        parts.monitor.log(state.step, values)
        name = parts.evaluation.metric_for_best_model
        value = _ranking(values, name)
        greater = parts.evaluation.greater_is_better
        greater = not name.endswith(_SMALLER_IS_BETTER) if greater is None else greater
        best = state.best_metric
        if not math.isfinite(value):
            parts.monitor.event("warning", f"step {state.step}: {name} is {value}, which never counts as better")
        elif best is None or (value > best if greater else value < best):
            state.best_metric, state.best_step, state.evals_since_best = value, state.step, 0
            return state.step > 0
        state.evals_since_best += 1
        patience = parts.evaluation.early_stop_interval
        if patience and state.evals_since_best >= patience:
            self.status = "early_stopped"
        return False

    def _save(self) -> None:
        if self._saved_step == self.state.step:
            return
        self.state.window = self._window.sums_so_far()
        with self.parts.shared_weights():
            self.last_checkpoint = self.parts.saver.save(self)
        self._saved_step = self.state.step


def _ranking(values: dict[str, float], name: str) -> float:
    """The metric that ranks checkpoints.

    Raises:
        UsageError: evaluation gives none of that name.
    """
    key = name if name.startswith("eval_") else f"eval_{name}"
    if key not in values:
        raise UsageError(
            f"the evaluation has no metric {name!r}",
            where="--metric_for_best_model",
            fix=f"{did_you_mean(key, values)} metrics: {', '.join(sorted(values))}".strip(),
        )
    return values[key]


class _StepSums:
    """What one step adds up, over micro-batches and then over ranks."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.batch_losses: list[float] = []
        self.weight = 0.0
        self.loss = 0.0
        self.tokens = 0
        self.learning_rate = 0.0
        self.stop_asked = False
        self.sums: dict[str, float] = {}
        self.counts: dict[str, float] = {}

    def add(self, terms: LossTerms) -> None:
        self.batch_losses.append(terms.loss_sum.item())
        for name, value in terms.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
            self.counts[name] = self.counts.get(name, 0.0) + terms.counts[name]

    def reduce(self, group: ProcessGroup, copies: int, stop: StopRequest) -> None:
        """Add up over ranks; afterwards every rank holds the step's totals, and knows of a stop asked of any rank.

        Args:
            copies: ranks that hold the same terms.
        """
        names = sorted(self.sums)
        local = [sum(self.batch_losses), float(sum(b.num_tokens for b in self.batches)), float(bool(stop.requested))]
        local += [self.sums[n] for n in names] + [self.counts[n] for n in names]
        self.loss, tokens, stop_asked, *rest = (value / copies for value in group.sum(local))
        self.tokens, self.stop_asked = round(tokens), stop_asked > 0
        self.sums = dict(zip(names, rest[: len(names)], strict=True))
        self.counts = dict(zip(names, rest[len(names) :], strict=True))

    def rows_by_finiteness(self) -> tuple[list[str], list[str]]:
        """Rows of this rank's micro-batches whose loss isn't finite, and those of the others."""
        bad: list[str] = []
        fine: list[str] = []
        for batch, loss in zip(self.batches, self.batch_losses, strict=True):
            (fine if math.isfinite(loss) else bad).extend(str(ref) for ref in batch.refs)
        return bad, fine


class _Window:
    """Means between two logged lines: weighted by tokens, so that they don't depend on how steps were cut.

    The sums so far travel with a checkpoint, so a resumed run logs the same means as an uninterrupted one.
    """

    def __init__(self, earlier: dict[str, list[float]] | None = None) -> None:
        self.started = time.perf_counter()
        self.tokens = self.steps = 0
        self.sent: dict[str, float] = {}
        self.sums: dict[str, list[float]] = {name: list(pair) for name, pair in (earlier or {}).items()}

    def add(self, step: _StepSums) -> None:
        if not math.isfinite(step.loss):
            return
        self.tokens += step.tokens
        terms = {"loss": (step.loss, step.weight)}
        terms |= {name: (value, step.counts[name]) for name, value in step.sums.items()}
        for name, (value, count) in terms.items():
            pair = self.sums.setdefault(name, [0.0, 0.0])
            pair[0] += value
            pair[1] += count

    def add_traffic(self, sent: dict[str, float]) -> None:
        """A step's bytes by axis, as this rank sent them."""
        self.steps += 1
        for axis, num_bytes in sent.items():
            self.sent[axis] = self.sent.get(axis, 0.0) + num_bytes

    def sums_so_far(self) -> dict[str, list[float]]:
        return self.sums

    def metrics(self) -> dict[str, float]:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        means = {name: value / count for name, (value, count) in self.sums.items() if count}
        sent = {f"sent_mib/{axis}": num_bytes / self.steps / 2**20 for axis, num_bytes in self.sent.items()}
        return {**means, "tokens_per_second": self.tokens / seconds, **sent}
