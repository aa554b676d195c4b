"""Experts on several ranks train as in one process: losses, gradients, weights, and the auxiliary loss."""

import pytest
from equality import Outcome, assert_equal
from expert_models import MIXTURES, Case, one_process, spread_run
from pool import on_ranks

from swift.config.degrees import Degrees

TWO = Degrees(dp_shard=2, ep=2)


def check(case, degrees):
    results = on_ranks(degrees.world_size, spread_run, case, degrees, timeout_s=120)
    reference, balance = one_process(case, degrees.dp)
    for outcome, seen in results:
        if case.same_choice:  # Adam divides by gradients of nearly zero
            assert_equal(Outcome(outcome.losses, outcome.gradients), Outcome(reference.losses, reference.gradients))
            continue
        assert_equal(outcome, reference)
        assert seen == pytest.approx(balance, rel=1e-6)
    return balance


@pytest.mark.parametrize(
    "case",
    [
        Case(layout="padded", coefficient=0.5),
        Case(tuner="lora", coefficient=0.5),
        Case(coefficient=0.5, recompute=True),
        Case(coefficient=0.5, fsdp=True),
        pytest.param(Case(layout="padded"), marks=pytest.mark.slow),
        pytest.param(Case(tuner="lora", layout="padded", fsdp=True), marks=pytest.mark.slow),
        Case(same_choice=True, fsdp=True),
        Case(same_choice=True, implementation="grouped_mm"),
    ],
    ids=str,
)
def test_two_ranks_with_half_of_the_experts_each(case):
    balance = check(case, TWO)
    assert not case.coefficient or balance[0] > 1.0


@pytest.mark.parametrize(
    ("case", "degrees"),
    [
        (Case(layout="padded", coefficient=0.5), Degrees(dp_shard=4, ep=4)),
        pytest.param(Case(coefficient=0.5), Degrees(dp_shard=4, ep=2), marks=pytest.mark.slow),
        pytest.param(Case(), Degrees(dp_replicate=2, dp_shard=2, ep=2), marks=pytest.mark.slow),
        (Case(coefficient=0.5, fsdp=True), Degrees(dp_shard=4, ep=2)),
        pytest.param(Case(fsdp=True), Degrees(dp_replicate=2, dp_shard=2, ep=2), marks=pytest.mark.slow),
        (Case(coefficient=0.5), Degrees(dp_shard=2, ep=2, tp=2)),
        pytest.param(
            Case(coefficient=0.5, sequence_parallel=True, fsdp=True, layout="padded"),
            Degrees(dp_shard=2, ep=2, tp=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_four_ranks(case, degrees):
    check(case, degrees)


SAMPLE = {"gpt_oss", "deepseek_v3", "qwen2_moe"}  # biases and interleaved halves; sigmoid scores; shared experts


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in SAMPLE else pytest.mark.slow) for kind in sorted(set(MIXTURES))],
)
def test_architectures(kind):
    check(Case(kind, coefficient=0.5), TWO)


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_implementations_of_experts(implementation):
    check(Case(implementation=implementation), TWO)
