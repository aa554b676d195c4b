"""Every way of spreading a model gives the loss, the gradients and the weights of one process: alone and combined.

The case is a layout x a kind of model x what is tuned x how rows lie in a batch. `make test` runs one or two mixes of
every layout; `make test-all` runs them all. `docs/generate_parallelism.py` prints the table.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from distributed.equality import (
    KINDS,
    LAYOUTS,
    TUNERS,
    Outcome,
    assert_equal,
    build,
    make_batches,
    make_optimizer,
    single_process,
    whole_tensor,
)
from distributed.pool import on_ranks

from swift.config.degrees import Degrees
from swift.config.parallel import ParallelConfig
from swift.config.training import ObjectiveConfig
from swift.distributed.mesh import Mesh, build_mesh
from swift.training.parallelize import Making, make_strategy, spread_model
from swift.training.precision import Precision

MICRO_BATCHES = 4
# Gradients of key biases are what is left of sums that cancel: in float32, one process by itself is 6e-6 off.
DTYPES = {"gqa": torch.float64}


@dataclass(frozen=True)
class Case:
    """A layout of processes: sizes of axes, and settings beside them."""

    degrees: Degrees
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def parallelism(self) -> ParallelConfig:
        sizes = self.degrees
        return replace(
            ParallelConfig(
                tensor_parallel_size=sizes.tp,
                pipeline_parallel_size=sizes.pp,
                sequence_parallel_size=sizes.cp,
                expert_parallel_size=sizes.ep,
            ),
            **dict(self.settings),
        )


def layout(*, pp=1, rep=1, dp=1, ring=1, ulysses=1, tp=1, ep=1, **settings: Any) -> Case:
    return Case(Degrees(pp, rep, dp, ring, ulysses, tp, ep), tuple(settings.items()))


FSDP = {"fsdp": "fsdp2"}
LAYOUTS_OF_RANKS: dict[str, Case] = {
    # one way of cutting
    "FSDP": layout(dp=2, **FSDP),
    "FSDP, stage 2": layout(dp=2, zero_stage=2, **FSDP),
    "FSDP, stage 1": layout(dp=2, zero_stage=1, **FSDP),
    "FSDP, offloaded": layout(dp=2, fsdp_cpu_offload=True, **FSDP),
    "HSDP": layout(rep=2, dp=2, fsdp="hsdp"),
    "TP": layout(tp=2),
    "TP 4": layout(tp=4),
    "TP+SP": layout(tp=2, sequence_parallel=True),
    "PP gpipe": layout(pp=2, pipeline_schedule="gpipe"),
    "PP 1f1b": layout(pp=2),
    "PP 4": layout(pp=4),
    "PP interleaved": layout(pp=2, pipeline_schedule="interleaved"),
    "PP zbv": layout(pp=2, pipeline_schedule="zbv"),
    "CP ulysses": layout(ulysses=2),
    "CP ring": layout(ring=2),
    "CP ring x ulysses": layout(ring=2, ulysses=2),
    "CP allgather": layout(ring=2, attention_impl="allgather"),
    "EP": layout(dp=2, ep=2),
    # products
    "FSDPxTP": layout(dp=2, tp=2, **FSDP),
    "FSDPxTP+SP": layout(dp=2, tp=2, sequence_parallel=True, **FSDP),
    "HSDPxTP": layout(rep=2, dp=2, tp=2, fsdp="hsdp"),
    "PPxFSDP": layout(pp=2, dp=2, **FSDP),
    "PP zbv x FSDP": layout(pp=2, dp=2, pipeline_schedule="zbv", **FSDP),
    "PPxTP": layout(pp=2, tp=2),
    "PPxTP+SP": layout(pp=2, tp=2, sequence_parallel=True),
    "CP ring x FSDP": layout(ring=2, dp=2, **FSDP),
    "CP ulysses x FSDP": layout(ulysses=2, dp=2, **FSDP),
    "TPxCP": layout(tp=2, ring=2),
    "TPxCPxFSDP": layout(tp=2, ring=2, dp=2, **FSDP),
    "TP+SPxCP ulysses x FSDP": layout(tp=2, ulysses=2, dp=2, sequence_parallel=True, **FSDP),
    "PPxCPxFSDP": layout(pp=2, ring=2, dp=2, **FSDP),
    "EPxFSDP": layout(dp=4, ep=2, **FSDP),
    "EPxCPxFSDP": layout(dp=2, ring=2, ep=2, **FSDP),
    "EPxTP": layout(dp=2, ep=2, tp=2),
    "PPxEP": layout(pp=2, dp=2, ep=2),
    "PPxEPxFSDP": layout(pp=2, dp=2, ep=2, **FSDP),
    "4-D PPxCPxTPxFSDP, 8 ranks": layout(pp=2, ring=2, tp=2, dp=1, **FSDP),
    "4-D PPxCPxTPxFSDP, 16 ranks": layout(pp=2, ring=2, tp=2, dp=2, **FSDP),
}


def spread_runs(case: Case, mixes: list[Mix]) -> list[Outcome]:
    """What this rank gets of each mix; its parameters are whole. Nothing from ranks that hold what others hold too."""
    mesh = build_mesh(case.degrees, "cpu")
    outcomes = [spread_run(case, mesh, *mix) for mix in mixes]
    first = not any(mesh[axis].rank for axis in ("loss", "tp"))
    return outcomes if first else [Outcome(outcome.losses) for outcome in outcomes]


def spread_run(case: Case, mesh: Mesh, kind: str, tuner: str, rows: str, steps: int = 3) -> Outcome:
    making = Making(case.parallelism, ObjectiveConfig(), Precision(torch.float32, "cpu"))

    def make():
        tiny = build(kind, tuner, dtype=DTYPES.get(kind, torch.float32))
        return tiny.whole, tiny.causal_lm

    model = spread_model(make, mesh, making)
    strategy = make_strategy(model, making)
    optimizer = make_optimizer([part for _, part in model.local.named()])
    # a tied matrix that two stages hold counts under one of its names
    named = {name: p for name, p in model.local.named_whole() if name not in model.spread.copies}
    mine = make_batches(rows, MICRO_BATCHES)[mesh["dp"].rank :: mesh["dp"].size]
    outcome = Outcome()
    for step in range(steps):
        portions = strategy.prepare(mine)
        weight = share(sum(b.weight for p in portions for b in p), strategy.copies)

        def to_loss(loss_sum, weight=weight):
            return loss_sum / weight

        loss = 0.0
        for number, portion in enumerate(portions):
            last = number == len(portions) - 1
            terms = strategy.forward(portion, to_loss, last)
            loss += sum(float(term.loss_sum.detach()) for term in terms)
            strategy.backward(terms, to_loss, last)
        outcome.losses.append(share(loss, strategy.copies) / weight)
        strategy.clip(0.0)
        if step == 0:
            outcome.gradients = {n: whole_tensor(p.grad).clone() for n, p in named.items() if p.grad is not None}
        strategy.step(optimizer, None)
    outcome.weights = {n: whole_tensor(p.detach()).clone() for n, p in named.items()}
    return outcome


def share(value: float, copies: int) -> float:
    """The sum over all ranks of what `copies` of them hold alike."""
    total = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return total.item() / copies


@cache
def reference(kind: str, tuner: str, rows: str) -> Outcome:
    """One process in float64: what the ranks, in float32, differ from it is their own rounding alone."""
    (outcome,) = on_ranks(1, partial(single_process, dtype=torch.float64), kind, tuner, rows)
    return outcome


def possible(case: Case, kind: str) -> bool:
    return case.degrees.ep == 1 or kind == "moe"


Mix = tuple[str, str, str]
# a kind of model, what is tuned, how rows lie
MIXES: list[Mix] = list(itertools.product(KINDS, TUNERS, LAYOUTS))


def sampled(name: str) -> list[Mix]:
    """The mixes of a layout that `make test` runs: a diagonal through all of them, large layouts with one."""
    number, case = list(LAYOUTS_OF_RANKS).index(name), LAYOUTS_OF_RANKS[name]
    kinds = [kind for kind in KINDS if possible(case, kind)]
    return [
        (kinds[(number + 2 * turn) % len(kinds)], TUNERS[(number + turn) % 2], LAYOUTS[(number // 2 + turn) % 2])
        for turn in range(2 if case.degrees.world_size < 8 else 1)
    ]


def compare(name: str, mixes: list[Mix]) -> None:
    case = LAYOUTS_OF_RANKS[name]
    ranks = on_ranks(case.degrees.world_size, spread_runs, case, mixes, timeout_s=900.0)
    wrong = []
    for number, mix in enumerate(mixes):
        together = Outcome()
        for outcome in (outcomes[number] for outcomes in ranks):
            together.losses = outcome.losses
            together.gradients |= outcome.gradients
            together.weights |= outcome.weights
        try:
            assert_equal(together, reference(*mix))
        except AssertionError as error:
            wrong.append(f"{'-'.join(mix)}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", LAYOUTS_OF_RANKS)
def test_spread_is_one_process(name: str) -> None:
    compare(name, sampled(name))


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", LAYOUTS_OF_RANKS)
def test_every_mix_of_every_layout(name: str) -> None:
    done = sampled(name)
    compare(name, [mix for mix in MIXES if mix not in done and possible(LAYOUTS_OF_RANKS[name], mix[0])])


def test_the_sample_meets_every_kind_tuner_and_rows() -> None:
    met = {value for name in LAYOUTS_OF_RANKS for mix in sampled(name) for value in mix}
    assert met == {*KINDS, *TUNERS, *LAYOUTS}
