"""Training through a pipeline: the strategy of a model whose layers lie on several processes.

A step's micro-batches are one portion. `forward` runs them through the stages forward and backward, in the order of the
schedule (`swift.distributed.pipeline.schedules` says which idles how long and holds how much); `backward` adds up what
ranks still have to add. All ranks along `pp` load the same micro-batches and get the same loss terms.

A tied matrix is held by the first and the last stage. Its gradient is the sum of theirs, taken before clipping; so both
step alike and stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from swift.core.errors import UsageError
from swift.data.loading.batch import Batch, Layout, make_batch
from swift.distributed.collectives import all_reduce
from swift.distributed.context.batches import cut_batch, join_targets, number_targets, rows_length
from swift.distributed.gradients import clip_gradients, cut_axes
from swift.distributed.pipeline.runner import PipelineRunner
from swift.distributed.pipeline.schedules import SPLIT_BACKWARD, micro_batches_needed
from swift.distributed.sharding import sharded_modules
from swift.distributed.spread import Spread, finish_gradients, local_tensor
from swift.distributed.traffic import TRAFFIC
from swift.models.kinds import task_of
from swift.models.lora_kernel import disable_fast_lora
from swift.models.trained_linear import disable_trained_linear
from swift.objectives import LossTerms
from swift.optim.local import LocalParameters
from swift.training.module import Probe
from swift.training.stage import StageModule
from swift.training.strategy import Stepped, ToLoss, as_in_evaluation, measured, step_optimizer

# Rows are as long as the longest needs, rounded up by less than an eighth: then few lengths occur, and stages are
# seldom built anew.
_STEPS_PER_OCTAVE = 8


class Pipeline:
    """The stages of one process, as a strategy.

    Args:
        stages: this process's, cut along other axes and sharded already.
        local: this process's parts of `stage_parameters(stages)`, which the optimizer was built over.
        schedule: gpipe, 1f1b, interleaved or zbv.
        pad_token_id: of the padding at the end of rows; multiple: what a row's length must be divisible by, beside what
            sharing it along `cp` takes (the size of `tp` with sequence parallelism).

    Attributes:
        names: of what the objective sums up beside the loss, in training or not; the last stage tells them, once.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        spread: Spread,
        local: LocalParameters,
        schedule: str,
        *,
        pad_token_id: int = 0,
        multiple: int = 1,
    ) -> None:
        self.mesh = spread.mesh
        self.module: nn.Module = nn.ModuleList(stages)
        self.stages = list(stages)
        self.device = next(self.module.parameters()).device
        self._spread = spread
        self.local = local
        self._named = list(local.named_whole())
        self._schedule = schedule
        self._cut = partial(cut_batch, mesh=spread.mesh, pad_token_id=pad_token_id, multiple=multiple)
        self._rows_length = partial(rows_length, mesh=spread.mesh)
        self._multiple = multiple
        self._empty = make_batch([], [], Layout(padding_free=True, pad_token_id=pad_token_id))
        num_stages = stages[0].chunk.num_stages
        modules = {stage.chunk.stage: stage for stage in stages}
        self.runner = PipelineRunner(modules, num_stages, spread.mesh["pp"], schedule, self.device)
        self.names: dict[bool, list[str]] = {}
        self._norm = 0.0
        self._refuse_unknown()
        if schedule in SPLIT_BACKWARD:  # functions of inputs and weights at once would run backward twice
            disable_fast_lora(self.module)
            disable_trained_linear(self.module)
        self._prepare_sums()
        self._tied = self._find_tied()

    def _refuse_unknown(self) -> None:
        compiled = any(getattr(part, "_compiled_call_impl", None) is not None for part in self.module.modules())
        if compiled and self._schedule in SPLIT_BACKWARD:
            raise UsageError(
                f"--pipeline_schedule {self._schedule} takes gradients of inputs and weights apart, and compiled "
                "layers give them at once",
                where="--torch_compile",
                fix="--pipeline_schedule interleaved, or leave --torch_compile out",
            )
        if len(self.stages) > 1 and any(stage.router_loss is not None for stage in self.stages):
            raise UsageError(
                f"--pipeline_schedule {self._schedule} can't balance the experts' load",
                where="--router_aux_loss_coef",
                fix="--pipeline_schedule 1f1b",
            )

    def _prepare_sums(self) -> None:
        """Who adds gradients up over data-parallel ranks: `fully_shard`, or we do once a step."""
        for stage in self.stages:
            if isinstance(stage, FSDPModule):
                for part in sharded_modules(stage):  # gathered once a step, not once a micro-batch
                    part.set_reshard_after_forward(False, recurse=False)
                continue
            for name, parameter in stage.model.named_parameters():
                # the tokens of all ranks along ep came to an expert's
                for axis in ("dp_replicate", "efsdp") if "ep" in cut_axes(parameter) else ("loss",):
                    self._spread.mark_partial(name, axis)

    @property
    def copies(self) -> int:
        return self.mesh["pp"].size * self.mesh["tp"].size

    def prepare(self, batches: list[Batch]) -> list[list[Batch]]:
        """All micro-batches of a step, as rows of one length; empty ones make up the number that the schedule needs."""
        self.local.drop_gradients()  # of a step that was left out
        needed = micro_batches_needed(self._schedule, len(batches), self.mesh["pp"].size)
        if needed > len(batches):
            batches = [*batches, *[self._nothing(batches[0])] * (needed - len(batches))]
        return [[self._cut(batch, length=self._common_length(batches)) for batch in batches]]

    def _nothing(self, batch: Batch) -> Batch:
        """A micro-batch without targets, in which all is known of the step that is known in `batch`."""
        facts = {name: fact[:0] for name, fact in batch.facts.items()}
        sequences = None if batch.sequences is None else batch.sequences.emptied()
        return replace(self._empty, sequences=sequences, facts=facts)

    def _common_length(self, batches: list[Batch]) -> int:
        unit = self._rows_length(self._empty, multiple=self._multiple)
        longest = max(self._rows_length(batch, multiple=self._multiple) for batch in batches)
        octave = 1 << ((longest // unit).bit_length() - 1)  # longest is at least so many units, and less than twice
        step = self._multiple * max(1, octave // _STEPS_PER_OCTAVE)
        return max(self._rows_length(batch, multiple=step) for batch in batches)

    def forward(self, portion: list[Batch], to_loss: ToLoss, last: bool) -> list[LossTerms]:
        """Runs the whole step, backward as well."""
        tokens = self._load(portion, to_loss)
        self.runner.train(len(portion), tokens)
        return self._share_terms(len(portion))

    def backward(self, terms: list[LossTerms], to_loss: ToLoss, last: bool) -> None:
        """Adds up what the schedule left apart; the optimizer's parameters get the gradients of the whole step."""
        finish_gradients(self._named, self._spread)
        self._sum_tied()
        self.local.hand_over_gradients()

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> LossTerms:
        tokens = self._load([self._cut(batch)], None)
        self.runner.evaluate(0, tokens)
        for stage in self.stages:
            for part in sharded_modules(stage):
                part.reshard()
        return self._share_terms(1)[0]

    @torch.no_grad()
    def measure(self, batch: Batch, probe: Probe) -> torch.Tensor:
        mine = self._cut(number_targets(batch)).to(self.device)
        last = next((stage for stage in self.stages if stage.chunk.last), None)
        with as_in_evaluation(self.module):
            tokens = self._load([mine], None)
            if last is not None:
                last.probe = probe
            try:
                self.runner.evaluate(0, tokens)
            finally:
                if last is not None:
                    last.probe = None
        for stage in self.stages:
            for part in sharded_modules(stage):
                part.reshard()
        found = None if last is None else measured(last.terms[0]).contiguous()
        return join_targets(self._from_last(found), mine, len(batch.target_index), self.mesh["cp"])

    def _from_last(self, found: torch.Tensor | None) -> torch.Tensor:
        """The last stage's tensor, on all ranks along `pp`."""
        axis = self.mesh["pp"]
        facts: list = [None if found is None else (tuple(found.shape), found.dtype)]
        dist.broadcast_object_list(facts, group=axis.group, group_src=self.runner.last_rank)
        shape, dtype = facts[0]
        whole = torch.empty(shape, dtype=dtype, device=self.device) if found is None else found
        dist.broadcast(whole, group=axis.group, group_src=self.runner.last_rank)
        TRAFFIC.count(axis.name, "broadcast", whole.numel() * whole.element_size() if found is not None else 0)
        return whole

    def clip(self, limit: float) -> float:
        self._norm = clip_gradients(self._named, self._spread, limit)
        return self._norm

    def step(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> Stepped:
        """Change the weights and drop the gradients; all stages leave the step out if a gradient of one overflowed."""
        if scaler is not None and not math.isfinite(self._norm):
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
            stepped = Stepped(False)
        else:
            stepped = step_optimizer(optimizer, scaler)
        self.local.drop_gradients()
        return stepped

    def _load(self, portion: list[Batch], to_loss: ToLoss | None) -> int:
        """Give the stages their micro-batches; tokens of each on this process."""
        batches = [batch.to(self.device) for batch in portion]
        for stage in self.stages:
            stage.load(batches, to_loss)
        tokens = batches[0].input_ids.shape[1]
        if not self.runner.described:
            training = self.module.training
            self.module.eval()
            self.runner.describe(tokens)
            self.module.train(training)
        return tokens

    def _share_terms(self, count: int) -> list[LossTerms]:
        """The loss terms of all micro-batches, which the last stage has, and what other stages add to them."""
        axis, training = self.mesh["pp"], self.module.training
        last = next((stage for stage in self.stages if stage.chunk.last), None)
        if training not in self.names:
            told = [sorted(last.terms[0].sums) if last is not None else None]
            dist.broadcast_object_list(told, group=axis.group, group_src=self.runner.last_rank, device=self.device)
            assert told[0] is not None
            self.names[training] = told[0]
        names = self.names[training]
        rows = torch.zeros(count, 2 + 2 * len(names), dtype=torch.float64, device=self.device)
        for stage in self.stages:
            for number, terms in stage.terms.items():
                for column, name in enumerate(names):
                    if name in terms.sums:
                        rows[number, 2 + column] += terms.sums[name]
                if stage is last:
                    rows[number, 0] = terms.loss_sum
                    counts = [terms.weight, *(terms.counts[name] for name in names)]
                    rows[number, [1, *range(2 + len(names), rows.shape[1])]] = rows.new_tensor(counts)
        return [_terms(row, names) for row in all_reduce(rows, axis).tolist()]

    def _find_tied(self) -> dict[str, StageModule]:
        """Stages of this process with a trained matrix that is the embedding of the first and the head of the last."""
        chunk = self.stages[0].chunk
        if chunk.num_stages == 1 or not _ties_ends(chunk.causal_lm):
            return {}
        tied = {end: stage for stage in self.stages for end in ("first", "last") if getattr(stage.chunk, end)}
        tied = {end: stage for end, stage in tied.items() if _end_matrix(stage, end).requires_grad}
        if len(tied) == 2 and _end_matrix(tied["first"], "first") is _end_matrix(tied["last"], "last"):
            return {}  # one parameter in both places
        if "last" in tied:
            matrix = _end_matrix(tied["last"], "last")
            self._spread.copies |= {name for name, p in tied["last"].model.named_parameters() if p is matrix}
        return tied

    @torch.no_grad()
    def _sum_tied(self) -> None:
        """Both ends of a tied matrix get the sum of both gradients."""
        grads = {}
        for end, stage in self._tied.items():
            matrix = _end_matrix(stage, end)
            if matrix.grad is None:
                matrix.grad = torch.zeros_like(matrix)
            grads[end] = local_tensor(matrix.grad)
        if len(grads) == 2:
            grads["first"].add_(grads["last"])
            grads["last"].copy_(grads["first"])
        elif grads:
            (end, mine), axis = next(iter(grads.items())), self.mesh["pp"]
            mine = mine if mine.is_contiguous() else mine.contiguous()
            theirs = torch.empty_like(mine)
            peer = 0 if end == "last" else self.runner.last_rank
            ways = [(dist.isend, mine), (dist.irecv, theirs)]
            ops = [dist.P2POp(way, tensor, group=axis.group, group_peer=peer) for way, tensor in ways]
            TRAFFIC.count(axis.name, "send", mine.numel() * mine.element_size())
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            grads[end].add_(theirs)


def stage_parameters(stages: Sequence[StageModule]) -> list[tuple[str, nn.Parameter]]:
    """This process's parameters under their names in the whole model, each once."""
    named = {parameter: name for stage in reversed(stages) for name, parameter in stage.model.named_parameters()}
    return [(name, parameter) for parameter, name in named.items()]


def tie_stages(stages: Sequence[StageModule]) -> None:
    """Let the embedding of the first stage be the head of the last, where one process holds both (zbv's rank 0).

    Call it before the optimizer is made. Not where `fully_shard` will take the stages, each of which owns its
    parameters: `Pipeline` keeps two copies equal then.
    """
    ends = {end: stage for stage in stages for end in ("first", "last") if getattr(stage.chunk, end)}
    if len(ends) == 2 and _ties_ends(stages[0].chunk.causal_lm):
        head = ends["last"].chunk.causal_lm.get_output_embeddings()
        head.weight = ends["first"].chunk.causal_lm.get_input_embeddings().weight


def _ties_ends(causal_lm: PreTrainedModel) -> bool:
    """Whether the embedding is the head too: of a language model only."""
    tied = getattr(causal_lm.config.get_text_config(), "tie_word_embeddings", False)
    return bool(tied) and task_of(causal_lm).kind == "causal_lm"


def _end_matrix(stage: StageModule, end: str) -> nn.Parameter:
    causal_lm = stage.chunk.causal_lm
    module = causal_lm.get_input_embeddings() if end == "first" else causal_lm.get_output_embeddings()
    matrix = module.weight
    assert isinstance(matrix, nn.Parameter)
    return matrix


def _terms(row: list[float], names: list[str]) -> LossTerms:
    loss_sum, weight, *rest = row
    sums = {
        name: torch.tensor(value, dtype=torch.float64) for name, value in zip(names, rest[: len(names)], strict=True)
    }
    counts = dict(zip(names, rest[len(names) :], strict=True))
    return LossTerms(torch.tensor(loss_sum, dtype=torch.float64), weight, sums, counts)
