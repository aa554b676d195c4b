"""Distillation: a student learns the next-token distributions of a teacher.

What is known of the teacher comes with the batch, per target: its hidden states (and its head lies here), its k best
tokens, or its log-probability of the target alone. `divergence` says what the first two are compared by. With the last,
texts that the student wrote are judged token by token (on-policy distillation as a policy gradient): with
A = log T(y) - log S_old(y), held constant,

    loss = -A S(y) / S_old(y)

whose gradient is in expectation over y ~ S_old that of KL(S || T), and whose value, where S is S_old, estimates it. A
multiple of the plain negative log-likelihood of the targets can be added (`sft_alpha`).

A chunk of tokens at a time has logits, the teacher's too; gradients are taken in the forward pass. Where models pad
their vocabulary (the matrix has more rows than the tokenizer has tokens), only the tokenizer's tokens are compared, and
both distributions are normalised over these; the likelihood is over all columns, as everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from swift.core.errors import ModelError
from swift.distributed.collectives import all_gather, all_reduce
from swift.models.head import OutputHead
from swift.objectives.causal_lm import CausalLM, LossTerms
from swift.objectives.chunked_head import ChunkedHead, Columns, columns_of, head_width
from swift.objectives.divergence import TopK, generalized_jsd, log_normalizer, top_k_divergence

# about half of the arrays of a chunk's size that are alive at once; smaller chunks cost time
_BUFFERS = 2
_UNWEIGHTED = ("token_accuracy", "agreement")
_FORMS = ("teacher_hidden", "teacher_topk_ids", "teacher_logps")


class DistillBatch(Protocol):
    """What the objective needs of a batch.

    `facts` has one of: "teacher_hidden" [targets, teacher's hidden]; "teacher_topk_ids" int64 [targets, k] and
    "teacher_topk_logps" [targets, k]; "teacher_logps" [targets], and then perhaps "old_logps" [targets], the student's
    when it wrote the text. All log-probabilities are at the temperature of the loss.
    """

    target_ids: torch.Tensor  # int64 [targets]
    target_weights: torch.Tensor  # fp32 [targets]
    facts: dict[str, torch.Tensor]
    sequences: Any  # None, or what has `step`, the numbers of the whole optimiser step

    @property
    def weight(self) -> float: ...


class Distillation(NamedTuple):
    """How a student is compared with its teacher.

    Attributes:
        beta: 0 is KL(T || S), 1 is KL(S || T), between is the generalised JSD.
        temperature: divides the logits of both.
        sft_alpha: weight of the negative log-likelihood.
        tail: whether a teacher's k best tokens are compared together with the rest; else they are renormalised.
        vocab_size: tokens that both tokenizers have; 0: as many as the narrower head has (or the student's, where the
            teacher has no head here).
    """

    beta: float = 0.5
    temperature: float = 1.0
    sft_alpha: float = 0.0
    tail: bool = True
    vocab_size: int = 0


DEFAULTS = Distillation()


class _Summary(NamedTuple):
    """Of logits [tokens, own vocab], over all ranks: log Σ exp [tokens, 1], the target's [tokens], the first guess."""

    normalizer: torch.Tensor
    target: torch.Tensor
    guess: torch.Tensor


class _Judged(NamedTuple):
    """Of each token: the loss; its slope [tokens, own vocab] with respect to logits at temperature 1; what else is
    known, by the metric's name; the teacher's first guess, if it is known."""

    value: torch.Tensor
    slope: torch.Tensor
    known: dict[str, torch.Tensor]
    teacher_guess: torch.Tensor | None


@dataclass(frozen=True)
class DistillObjective:
    """Distillation as an objective.

    Args:
        options: how the two are compared.
        teacher: the teacher's head, where batches bring its hidden states. It may be cut over the same ranks.
        chunk: tokens at a time; 0 chooses.

    Batches of plain examples are averaged over token weights, as `CausalLM` does. With units, the mean over the tokens
    of the whole step is kept: their sum is multiplied by step["units"] / step["tokens"].
    """

    options: Distillation = DEFAULTS
    teacher: OutputHead | None = None
    chunk: int = 0

    def __call__(self, hidden: torch.Tensor, head: OutputHead, batch: DistillBatch) -> LossTerms:
        """hidden: [targets, hidden], the student's states that predict `batch.target_ids`.

        Raises:
            ModelError: the batch knows nothing of the teacher, or in more than one form; its head is missing, or a head
                that is cut over ranks is more than a matrix and a bias.
        """
        student = ChunkedHead(hidden, head, chunk=self.chunk, buffers=_BUFFERS)
        measure = _Measure(self, student, batch.facts)
        scale = 1.0
        if batch.sequences is not None:
            scale = batch.sequences.step["units"] / batch.sequences.step["tokens"]
        total = torch.zeros((), dtype=student.dtype, device=hidden.device)
        sums: dict[str, torch.Tensor] = {}
        for rows in student.chunks():
            weights = batch.target_weights[rows].to(student.dtype)
            with torch.no_grad():
                loss, found = measure(rows, batch.target_ids[rows], weights, weights * scale)
                total += loss
            for name, value in found.items():
                sums[name] = sums[name] + value if name in sums else value
        num_tokens = float(batch.target_weights.sum(dtype=torch.float64))
        counts = {name: float(len(batch.target_ids)) if name in _UNWEIGHTED else num_tokens for name in sums}
        return LossTerms(student.finish(total), batch.weight, sums, counts)

    def evaluation(self) -> CausalLM:
        """The plain likelihood, which needs no teacher."""
        return CausalLM(chunk=self.chunk)


class _Measure:
    """One chunk after another: loss, metrics, and the gradient handed to the student's head."""

    def __init__(self, objective: DistillObjective, student: ChunkedHead, facts: Mapping[str, torch.Tensor]) -> None:
        self.options, self.teacher, self.student, self.facts = objective.options, objective.teacher, student, facts
        found = [name for name in _FORMS if name in facts]
        if len(found) != 1:
            what = "nothing is known of the teacher" if not found else "the teacher is known in several forms"
            raise ModelError(f"{what}: a batch needs one of {', '.join(_FORMS)}, this has {sorted(facts) or 'none'}")
        self.form = found[0]
        width = student.width
        if self.form == "teacher_hidden":
            if self.teacher is None:
                raise ModelError("batches bring a teacher's hidden states, and there is no head to make logits of them")
            width = min(width, head_width(self.teacher, facts["teacher_hidden"]))
        self.vocab_size = min(width, self.options.vocab_size or width)
        self.num_own = 0

    def __call__(
        self, rows: slice, targets: torch.Tensor, weights: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The chunk's loss, and the sums of its metrics.

        Args:
            targets: int64 [tokens]; weights, factor: [tokens], in metrics and in the loss.
        """
        student, options = self.student, self.options
        logits = student.logits(rows)
        self.num_own = min(max(self.vocab_size - student.start, 0), logits.shape[1])
        scaled = self._scaled(logits[:, : self.num_own])
        summary = _summarize(scaled, targets, student)
        whole = summary.normalizer
        if options.temperature != 1 or self.vocab_size < student.width:
            whole = log_normalizer(logits, student.axis)
        nll = whole[:, 0] - summary.target * options.temperature
        log_s = scaled - summary.normalizer
        entropy = all_reduce(-(log_s.exp() * log_s).sum(1), student.axis)
        judged = self._judge(rows, targets, log_s, summary)
        sums = {"token_accuracy": (summary.guess == targets).sum()}
        if judged.teacher_guess is not None:
            sums["agreement"] = (summary.guess == judged.teacher_guess).sum()
        for name, value in {"nll": nll, "student_entropy": entropy, **judged.known}.items():
            sums[name] = (weights * value).sum()
        if student.learning:
            gradient = judged.slope.mul_(factor[:, None] / options.temperature)
            if gradient.shape != logits.shape:  # padding columns
                gradient = nn.functional.pad(gradient, (0, logits.shape[1] - gradient.shape[1]))
            if options.sft_alpha:
                pull = options.sft_alpha * factor[:, None]
                gradient.addcmul_((logits - whole).exp_(), pull)
                own, here = _column_of(targets, student, logits.shape[1])
                gradient.scatter_add_(1, own, -pull.masked_fill(~here, 0.0))
            student.backward(rows, gradient)
        return (factor * (judged.value + options.sft_alpha * nll)).sum(), sums

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.options.temperature == 1 else logits / self.options.temperature

    def _judge(self, rows: slice, targets: torch.Tensor, log_s: torch.Tensor, summary: _Summary) -> _Judged:
        facts = {name: value[rows] for name, value in self.facts.items()}
        if self.form == "teacher_hidden":
            return self._with_logits(facts["teacher_hidden"], targets, log_s)
        if self.form == "teacher_topk_ids":
            return self._with_top_k(TopK(facts["teacher_topk_ids"].long(), facts["teacher_topk_logps"]), log_s)
        current = (summary.target - summary.normalizer[:, 0]).to(log_s.dtype)
        return self._with_samples(facts["teacher_logps"], facts.get("old_logps"), targets, log_s, current)

    def _with_logits(self, hidden: torch.Tensor, targets: torch.Tensor, log_s: torch.Tensor) -> _Judged:
        student, options = self.student, self.options
        assert self.teacher is not None  # seen to at the beginning
        columns = Columns(student.start, student.start + self.num_own, student.share)
        logits = columns_of(self.teacher, hidden, columns, log_s.dtype)
        scaled = self._scaled(logits)
        summary = _summarize(scaled, targets, student)
        whole = summary.normalizer if options.temperature == 1 else log_normalizer(logits, student.axis)
        known = {"teacher_nll": whole[:, 0] - summary.target * options.temperature}
        value, slope = generalized_jsd(log_s, scaled - summary.normalizer, options.beta, student.axis)
        return _Judged(value, slope, known | {"divergence": value}, summary.guess)

    def _with_top_k(self, teacher: TopK, log_s: torch.Tensor) -> _Judged:
        part = (self.student.start, self.vocab_size)
        value, slope = top_k_divergence(
            log_s, teacher, self.options.beta, part, tail=self.options.tail, axis=self.student.axis
        )
        best = teacher.ids.gather(1, teacher.logps.argmax(1, keepdim=True))[:, 0]
        covered = teacher.logps.to(log_s.dtype).exp().sum(1)
        return _Judged(value, slope, {"divergence": value, "teacher_topk_mass": covered}, best)

    def _with_samples(
        self,
        teacher: torch.Tensor,
        old: torch.Tensor | None,
        targets: torch.Tensor,
        log_s: torch.Tensor,
        current: torch.Tensor,
    ) -> _Judged:
        teacher = teacher.to(log_s.dtype)
        before = current if old is None else old.to(log_s.dtype)
        value = (before - teacher) * (current - before).exp()
        # the loss is value(log S(y)), whose derivative is value again
        slope = log_s.exp().mul_(-value[:, None])
        own, here = _column_of(targets, self.student, log_s.shape[1])
        if log_s.shape[1]:
            slope.scatter_add_(1, own, value[:, None].masked_fill(~here, 0.0))
        return _Judged(value, slope, {"divergence": before - teacher, "teacher_nll": -teacher}, None)


def _column_of(targets: torch.Tensor, student: ChunkedHead, num_own: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's column among the first `num_own` of this rank's, 0 for those of others; whether it is here. Both
    are [tokens, 1]."""
    own = (targets - student.start)[:, None]
    here = (own >= 0) & (own < num_own)
    return own.masked_fill(~here, 0), here


def _summarize(logits: torch.Tensor, targets: torch.Tensor, student: ChunkedHead) -> _Summary:
    """Of logits [tokens, own], in the student's columns."""
    if not logits.shape[1]:  # a rank that has only padding
        logits = logits.new_full((len(logits), 1), -math.inf)
        own, here = torch.zeros_like(targets)[:, None], torch.zeros_like(targets, dtype=torch.bool)[:, None]
    else:
        own, here = _column_of(targets, student, logits.shape[1])
    peak, guess = logits.max(1)
    target = logits.gather(1, own).masked_fill(~here, 0.0)[:, 0]
    # a token's number is exact in fp32 below 2^24
    numbers = torch.stack([logits.logsumexp(1), target, peak, (guess + student.start).to(peak.dtype)])
    normalizers, parts, peaks, guesses = all_gather(numbers[:, None], student.axis, 1).unbind(0)  # [ranks, tokens] each
    guess = guesses.gather(0, peaks.argmax(0)[None])[0].long()
    return _Summary(normalizers.logsumexp(0)[:, None], parts.sum(0), guess)
