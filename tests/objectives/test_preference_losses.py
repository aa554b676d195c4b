"""Preference losses against the papers' formulas, written out per pair in numpy, and their gradients against finite
differences; and the composed objectives: how a step is cut or spread changes nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from pool import on_ranks
from torch import nn

from swift.config.degrees import Degrees
from swift.core.errors import UsageError
from swift.data.loading.batch import Batch, Sequences
from swift.data.units import Kind
from swift.distributed.mesh import Axis, build_mesh
from swift.models.head import OutputHead
from swift.objectives.logprobs import token_logprobs
from swift.objectives.pair_losses import Pairs, Side, combine, couple, kto, log1mexp, reward_model
from swift.objectives.preference import KtoObjective, PreferenceObjective, RewardObjective, batch_pairs
from swift.objectives.preference_options import KINDS, PreferenceOptions
from swift.objectives.sequences import places

DELTA, SCALE = 0.07, 0.21  # BCO's mean, likelihood terms' scale
LENGTHS = ((7.0, 3.0), (2.0, 9.0), (5.0, 5.0), (1.0, 4.0))


def sig(x: float) -> float:
    return 1 / (1 + np.exp(-x))


def cdpo(x: float, e: float) -> float:
    return -(1 - e) * np.log(sig(x)) - e * np.log(sig(-x))


# one pair: x has S_w, S_l, S'_w, S'_l, |y_w|, |y_l|; o are the options
def h(x):
    return x[0] - x[2], x[1] - x[3]


def d(x):
    return h(x)[0] - h(x)[1]


def odds(average):
    return np.log(np.exp(average) / (1 - np.exp(average)))


def exo(x, o):
    e = o.label_smoothing or 1e-3
    q = sig(o.beta * d(x))
    return q * np.log(q / (1 - e)) + (1 - q) * np.log((1 - q) / e)


def discopop(x, o):
    g = sig(o.beta * d(x) / o.discopop_tau)
    return (1 - g) * -np.log(sig(o.beta * d(x))) + g * np.exp(-o.beta * d(x))


def alpha_reward(x, o):
    return [(1 - np.exp(-o.alphapo_alpha * s / n)) / o.alphapo_alpha for s, n in ((x[0], x[4]), (x[1], x[5]))]


def divergence(fprime):
    return lambda x, o: cdpo(o.beta * (fprime(np.exp(h(x)[0]), o) - fprime(np.exp(h(x)[1]), o)), o.label_smoothing)


make = PreferenceOptions
FORMULAS = {
    "sigmoid": (make(), lambda x, o: -np.log(sig(o.beta * d(x)))),
    "cdpo": (make(label_smoothing=0.1), lambda x, o: cdpo(o.beta * d(x), 0.1)),
    "reference_free": (make(reference_free=True), lambda x, o: -np.log(sig(o.beta * (x[0] - x[1])))),
    "trl ignores smoothing": (make(label_smoothing=0.1, compat="trl"), lambda x, o: -np.log(sig(o.beta * d(x)))),
    "hinge": (make(loss_types=("hinge",)), lambda x, o: max(0, 1 - o.beta * d(x))),
    "ipo": (
        make(loss_types=("ipo",), beta=0.3),
        lambda x, o: (h(x)[0] / x[4] - h(x)[1] / x[5] - 1 / (2 * o.beta)) ** 2,
    ),
    "exo": (make(loss_types=("exo_pair",), label_smoothing=0.05), exo),
    "exo of ms-swift": (make(loss_types=("exo_pair",), compat="ms-swift"), exo),
    "nca": (
        make(loss_types=("nca_pair",)),
        lambda x, o: (
            -np.log(sig(o.beta * h(x)[0])) - (np.log(sig(-o.beta * h(x)[0])) + np.log(sig(-o.beta * h(x)[1]))) / 2
        ),
    ),
    "robust": (
        make(loss_types=("robust",), label_smoothing=0.2),
        lambda x, o: (-0.8 * np.log(sig(o.beta * d(x))) + 0.2 * np.log(sig(-o.beta * d(x)))) / 0.6,
    ),
    "bco": (
        make(loss_types=("bco_pair",)),
        lambda x, o: -np.log(sig(o.beta * h(x)[0] - DELTA)) - np.log(sig(-(o.beta * h(x)[1] - DELTA))),
    ),
    "bco of trl": (
        make(loss_types=("bco_pair",), compat="trl"),
        lambda x, o: -np.log(sig(o.beta * h(x)[0])) - np.log(sig(-o.beta * h(x)[1])),
    ),
    "sppo": (
        make(loss_types=("sppo_hard",), beta=0.5),
        lambda x, o: (h(x)[0] - 1) ** 2 + (h(x)[1] + 1) ** 2,
    ),
    "apo_zero": (make(loss_types=("apo_zero",)), lambda x, o: 1 - sig(o.beta * h(x)[0]) + sig(o.beta * h(x)[1])),
    "apo_down": (make(loss_types=("apo_down",)), lambda x, o: sig(o.beta * h(x)[0]) + 1 - sig(o.beta * d(x))),
    "discopop": (make(loss_types=("discopop",), discopop_tau=0.3), discopop),
    "sigmoid_norm": (
        make(loss_types=("sigmoid_norm",), beta=5.0),
        lambda x, o: -np.log(sig(5 * (h(x)[0] / x[4] - h(x)[1] / x[5]))),
    ),
    "mixture": (
        make(loss_types=("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 1.5), label_smoothing=0.1),
        lambda x, o: (
            0.8 * cdpo(o.beta * d(x), 0.1)
            + 0.2 * (-np.log(sig(o.beta * h(x)[0] - DELTA)) - np.log(sig(DELTA - o.beta * h(x)[1])))
            - 1.5 * SCALE * x[0]
        ),
    ),
    "rpo_alpha": (make(rpo_alpha=0.5), lambda x, o: -np.log(sig(o.beta * d(x))) - 0.5 * SCALE * x[0]),
    "forward_kl": (make(f_divergence="forward_kl"), divergence(lambda u, o: -1 / u)),
    "js": (make(f_divergence="js_divergence", label_smoothing=0.1), divergence(lambda u, o: np.log(2 * u / (1 + u)))),
    "alpha": (
        make(f_divergence="alpha_divergence", f_alpha=0.3),
        divergence(lambda u, o: (u ** (0.3 - 1) - 1) / (0.3 - 1)),
    ),
    "alpha of ms-swift": (
        make(f_divergence="alpha_divergence", f_alpha=0.3, compat="ms-swift"),
        divergence(lambda u, o: (1 - u**-0.3) / 0.3),
    ),
    "alpha 1 is reverse KL": (
        make(f_divergence="alpha_divergence", f_alpha=1.0),
        lambda x, o: -np.log(sig(o.beta * d(x))),
    ),
    "robust of a divergence": (
        make(loss_types=("hinge",), f_divergence="forward_kl"),
        lambda x, o: max(0, 1 - o.beta * (np.exp(-h(x)[1]) - np.exp(-h(x)[0]))),
    ),
    "orpo": (
        make("orpo", ("orpo",)),
        lambda x, o: -o.beta * np.log(sig(odds(x[0] / x[4]) - odds(x[1] / x[5]))) - SCALE * x[0],
    ),
    "cpo": (
        make("cpo", cpo_alpha=0.7, label_smoothing=0.1),
        lambda x, o: cdpo(o.beta * (x[0] - x[1]), 0.1) - 0.7 * SCALE * x[0],
    ),
    "cpo hinge": (make("cpo", ("hinge",), cpo_alpha=0.0), lambda x, o: max(0, 1 - o.beta * (x[0] - x[1]))),
    "cpo ipo": (
        make("cpo", ("ipo",), beta=0.3),
        lambda x, o: (x[0] / x[4] - x[1] / x[5] - 1 / 0.6) ** 2,
    ),
    "simpo": (
        make("simpo", ("simpo",), beta=2.0, simpo_gamma=0.8),
        lambda x, o: -np.log(sig(2 * (x[0] / x[4] - x[1] / x[5]) - 0.8)),
    ),
    "alphapo": (
        make("simpo", ("alphapo",), beta=2.0, alphapo_alpha=0.25),
        lambda x, o: -np.log(sig(2 * (alpha_reward(x, o)[0] - alpha_reward(x, o)[1]) - 1)),
    ),
    "alphapo by its alpha": (
        make("simpo", ("simpo",), beta=2.0, alphapo_alpha=0.25, label_smoothing=0.1),
        lambda x, o: cdpo(2 * (alpha_reward(x, o)[0] - alpha_reward(x, o)[1]) - 1, 0.1),
    ),
    "alphapo 0": (
        make("simpo", ("alphapo",), beta=2.0),
        lambda x, o: -np.log(sig(2 * (x[0] / x[4] - x[1] / x[5]) - 1)),
    ),
}


def numbers() -> np.ndarray:
    """[pairs, 6]: S_w, S_l, S'_w, S'_l, |y_w|, |y_l|."""
    draw = np.random.default_rng(2)
    rows = []
    for lengths in LENGTHS:
        policy = [-n * draw.uniform(0.1, 2.0) for n in lengths]
        rows.append([*policy, *(s + draw.normal() for s in policy), *lengths])
    return np.array(rows)


def as_pairs(logps: torch.Tensor, rows: np.ndarray, options: PreferenceOptions) -> Pairs:
    rest = torch.tensor(rows)
    sides = [Side(logps[:, i], rest[:, i + 2] if options.needs_reference else None, rest[:, i + 4]) for i in range(2)]
    return Pairs(*sides, -logps[:, 0], SCALE, DELTA)


def differences(function, point: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Central differences of a function of an array."""
    grad = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        shift = np.zeros_like(point)
        shift[index] = step
        grad[index] = (function(point + shift) - function(point - shift)) / (2 * step)
    return grad


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_and_its_gradient(name):
    options, formula = FORMULAS[name]
    rows = numbers()

    def total(policy: np.ndarray) -> float:
        return sum(formula([*s, *row[2:]], options) for s, row in zip(policy, rows, strict=True))

    logps = torch.tensor(rows[:, :2], requires_grad=True)
    losses = combine(as_pairs(logps, rows, options.check()), options)
    np.testing.assert_allclose(losses.detach(), [formula(row, options) for row in rows], rtol=1e-11)
    losses.sum().backward()
    np.testing.assert_allclose(logps.grad, differences(total, rows[:, :2]), rtol=1e-6, atol=1e-8)


def test_every_loss_has_a_formula_here():
    tested = {loss for options, _ in FORMULAS.values() for loss in options.loss_types}
    everything = {loss for kind in ("dpo", "orpo", "cpo", "simpo") for loss in KINDS[kind]}
    assert everything - tested == {"aot", "aot_unpaired"}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_sorting_losses(name, smoothing):
    options = PreferenceOptions(loss_types=(name,), loss_weights=(0.6,), label_smoothing=smoothing).check()
    rows = numbers()

    def total(policy: np.ndarray) -> float:
        (w, r), (rw, rr) = policy.T, rows[:, 2:4].T
        gaps = np.sort(w - r) - np.sort(rw - rr) if name == "aot" else np.sort(w - rw) - np.sort(r - rr)
        return 0.6 * sum(cdpo(options.beta * gap, smoothing) for gap in gaps)

    coupling = couple(as_pairs(torch.tensor(rows[:, :2]), rows, options), options)
    assert float(coupling.value.sum()) == pytest.approx(total(rows[:, :2]), rel=1e-12)
    cotangents = torch.stack([coupling.chosen, coupling.rejected], 1)
    np.testing.assert_allclose(cotangents, differences(total, rows[:, :2]), rtol=1e-6, atol=1e-9)
    order = [2, 0, 3, 1]
    moved = couple(as_pairs(torch.tensor(rows[order, :2]), rows[order], options), options)
    torch.testing.assert_close(moved.chosen, coupling.chosen[order])


def test_log1mexp_is_exact_at_both_ends():
    x = torch.tensor([-1e-12, -1e-3, -0.69, -0.7, -5.0, -60.0], dtype=torch.float64, requires_grad=True)
    expected = [np.log(1e-12), *(float(np.log1p(-np.exp(v))) for v in (-1e-3, -0.69, -0.7, -5.0)), -np.exp(-60.0)]
    np.testing.assert_allclose(log1mexp(x).detach(), expected, rtol=1e-11)
    log1mexp(x).sum().backward()
    np.testing.assert_allclose(x.grad, [-1 / np.expm1(-v) for v in x.tolist()], rtol=1e-9)


def test_orpo_of_certain_answers_is_finite():
    options = PreferenceOptions("orpo", ("orpo",))
    logps = torch.tensor([[0.0, -1.0], [-1e-30, -300.0], [-300.0, 0.0]], requires_grad=True)
    side = [Side(logps[:, i], None, torch.ones(3)) for i in range(2)]
    loss = combine(Pairs(*side, -logps[:, 0], 0.1), options)
    loss.sum().backward()
    assert loss.isfinite().all() and logps.grad.isfinite().all()


def test_kto_and_reward_model():
    rows = numbers()
    ratio, desirable, z0 = rows[:, 0] - rows[:, 2], np.array([True, False, False, True]), 0.4
    options = PreferenceOptions("kto", ("kto",), beta=0.3, desirable_weight=1.2, undesirable_weight=0.7).check()
    expected = [
        1.2 * (1 - sig(0.3 * (r - z0))) if good else 0.7 * (1 - sig(0.3 * (z0 - r)))
        for r, good in zip(ratio, desirable, strict=True)
    ]
    ours = kto(torch.tensor(ratio), torch.tensor(desirable), z0, options)
    np.testing.assert_allclose(ours, expected, rtol=1e-12)
    chosen, rejected, margin = torch.tensor(rows[:, 0]), torch.tensor(rows[:, 1]), torch.tensor(rows[:, 4])
    ours = reward_model(chosen, rejected, margin, 0.01)
    np.testing.assert_allclose(
        ours, [-np.log(sig(r[0] - r[1] - r[4])) + 0.01 * (r[0] + r[1]) ** 2 for r in rows], rtol=1e-12
    )


FAULTS = {
    "label_smoothing": [
        {"loss_types": ("exo_pair",)},
        {"loss_types": ("robust",), "label_smoothing": 0.5},
        {"loss_types": ("hinge",), "label_smoothing": 0.1},
    ],
    "use_weighting": [{"loss_types": ("aot",), "wpo": True}],
    "f_divergence_type": [
        {"loss_types": ("sigmoid", "ipo"), "f_divergence": "forward_kl"},
        {"f_divergence": "total_variation"},
    ],
    "loss_type": [{"kind": "cpo", "loss_types": ("robust",)}, {"loss_types": ()}],
    "loss_weights": [{"loss_weights": (1.0, 2.0)}],
    "beta": [{"beta": 0.0}],
    "ld_alpha": [{"ld_alpha": 1.5}],
    "rlhf_type": [{"kind": "grpo"}],
    "compat": [{"compat": "peft"}],
}


@pytest.mark.parametrize(("flag", "given"), [(flag, given) for flag, cases in FAULTS.items() for given in cases])
def test_contradictions_name_the_flag(flag, given):
    with pytest.raises(UsageError) as caught:
        PreferenceOptions(**given).check()
    assert caught.value.where == f"--{flag}" and caught.value.fix


# composed objectives

WIDTH, VOCAB, PAIRS = 8, 19, 5


def step_batch(kind: str = "dpo") -> tuple[Batch, torch.Tensor]:
    """All units of a step as one batch, with everything that is worked out before its first gradient; and states."""
    draw = np.random.default_rng(8)
    sizes = draw.integers(1, 6, 2 * PAIRS)
    target = torch.tensor(np.repeat(np.arange(2 * PAIRS), 1 if kind == "rm" else sizes))
    generator = torch.Generator().manual_seed(3)
    count = len(target)
    unit = torch.arange(2 * PAIRS) if kind == "kto" else torch.arange(PAIRS).repeat_interleave(2)
    kinds = torch.tensor([int(Kind.CHOSEN), int(Kind.REJECTED)] * PAIRS)
    values = [(0.3 * i,) for i in range(len(unit.unique()))]
    ref = torch.randn(count, generator=generator, dtype=torch.float64) - 2
    weights = torch.rand(count, generator=generator).round(decimals=1) + 0.5
    sequences = Sequences(target, unit, kinds, values)
    empty = torch.zeros(1, 1, dtype=torch.int64)
    batch = Batch(
        empty, empty, None, None, torch.arange(count), torch.randint(0, VOCAB, (count,), generator=generator),
        weights, [], 1, sequences=sequences, facts={"ref_logps": ref, "place": places(target)},
    )  # fmt: skip
    chosen_tokens = float(weights[(kinds == int(Kind.CHOSEN))[target]].sum(dtype=torch.float64))
    sequences.step.update(units=len(values), chosen_tokens=chosen_tokens, kto_z0=0.2, bco_delta=DELTA)
    return batch, torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def part_of(batch: Batch, units: list[int]) -> tuple[Batch, torch.Tensor]:
    """The micro-batch of these units, and which targets those are."""
    whole = batch.sequences
    assert whole is not None
    mine = torch.isin(whole.unit, torch.tensor(units))
    keep = mine[whole.target]
    number = mine.cumsum(0) - 1
    renumbered = torch.tensor([units.index(int(u)) for u in whole.unit[mine]], dtype=torch.int64)
    facts = {n: f[units] if n == "value" else f[mine] for n, f in whole.facts.items()}
    sequences = Sequences(
        number[whole.target[keep]], renumbered, whole.kind[mine],
        [whole.values[u] for u in units], facts=facts, step=whole.step,
    )  # fmt: skip
    return cut(batch, keep, sequences), keep


def cut(batch: Batch, keep: torch.Tensor, sequences: Sequences) -> Batch:
    facts = {name: fact[keep] for name, fact in batch.facts.items()}
    ids, weights = batch.target_ids[keep], batch.target_weights[keep]
    return replace(batch, target_ids=ids, target_weights=weights, facts=facts, sequences=sequences)


def the_head(outputs: int = VOCAB) -> OutputHead:
    module = nn.Linear(WIDTH, outputs, bias=False, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.randn(outputs, WIDTH, generator=torch.Generator().manual_seed(6)))
    return OutputHead(module)


OBJECTIVES = {
    "sigmoid": PreferenceOptions(label_smoothing=0.1),
    "ipo": PreferenceOptions(loss_types=("ipo",)),
    "mpo": PreferenceOptions(loss_types=("sigmoid", "bco_pair", "sft"), loss_weights=(0.8, 0.2, 1.0)),
    "ld": PreferenceOptions(ld_alpha=0.4, rpo_alpha=0.3),
    "wpo": PreferenceOptions(wpo=True, rpo_alpha=0.3),
    "aot": PreferenceOptions(loss_types=("aot", "sigmoid"), loss_weights=(0.7, 0.3)),
    "aot_unpaired": PreferenceOptions(loss_types=("aot_unpaired",)),
    "orpo": PreferenceOptions("orpo", ("orpo",)),
    "simpo": PreferenceOptions("simpo", ("simpo",), beta=2.0, cpo_alpha=0.5),
    "kto": PreferenceOptions("kto", ("kto",)),
    "rm": PreferenceOptions("rm", ("rm",), center=0.01),
}


def objective(options: PreferenceOptions, axis: Axis | None = None):
    if options.kind == "rm":
        return RewardObjective(options, axis)
    return (KtoObjective if options.kind == "kto" else PreferenceObjective)(options, axis=axis)


def prepared(options: PreferenceOptions) -> tuple[Batch, torch.Tensor, OutputHead]:
    batch, hidden = step_batch(options.kind)
    head = the_head(1 if options.kind == "rm" else VOCAB)
    if options.sorts:
        with torch.no_grad():
            coupling = couple(
                batch_pairs(token_logprobs(hidden, head, batch.target_ids).logprobs, batch, options), options
            )
        batch.sequences.facts["value"] = coupling.value
        batch.sequences.facts["cotangent"] = torch.stack([coupling.chosen, coupling.rejected], 1).flatten()
    return batch, hidden, head


def run_parts(parts: list[tuple[Batch, torch.Tensor]], hidden: torch.Tensor, head: OutputHead, run) -> dict:
    """Loss, gradients and metrics of a step in parts."""
    hidden = hidden.clone().requires_grad_()
    weight, loss = sum(batch.weight for batch, _ in parts), 0.0
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for batch, keep in parts:
        terms = run(hidden[keep], head, batch)
        (terms.loss_sum / weight).backward()
        loss += terms.loss_sum.item() / weight
        for name in terms.sums:
            sums[name] = sums.get(name, 0.0) + float(terms.sums[name])
            counts[name] = counts.get(name, 0.0) + terms.counts[name]
    metrics = {name: sums[name] / counts[name] for name in sums}
    return {"loss": loss, "hidden": hidden.grad, "head": head.module.weight.grad, **metrics}


def assert_equal(ours: dict, theirs: dict) -> None:
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(
            torch.as_tensor(ours[name]), torch.as_tensor(value), rtol=1e-10, atol=1e-12, msg=name
        )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_how_a_step_is_cut_changes_nothing(name):
    options = OBJECTIVES[name].check()
    batch, hidden, head = prepared(options)
    whole = run_parts([(batch, torch.ones(len(hidden), dtype=torch.bool))], hidden, head, objective(options))
    head.module.weight.grad = None
    assert batch.sequences is not None
    units = list(range(batch.sequences.num_units))
    parts = [part_of(batch, group) for group in (units[:1], units[1:4], [], units[4:])]
    assert_equal(run_parts(parts, hidden, head, objective(options)), whole)
    assert whole["hidden"].abs().sum() > 0 and "rewards/chosen" in whole


def independent(options: PreferenceOptions) -> float:
    """The step's loss in numpy from the logits, for the options that change what the sums are."""
    batch, hidden, head = prepared(options)
    sequences = batch.sequences
    assert sequences is not None
    logits = hidden.numpy() @ head.module.weight.detach().numpy().T
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    logp = np.log(p[np.arange(len(p)), batch.target_ids.numpy()])
    w, ref = batch.target_weights.double().numpy(), batch.facts["ref_logps"].numpy()
    total, nll = 0.0, 0.0
    for pair in range(PAIRS):
        places_of = [np.flatnonzero(sequences.target.numpy() == 2 * pair + side) for side in range(2)]
        shorter = min(len(rows) for rows in places_of)
        ratio, v = [], []
        for rows in places_of:
            alpha = np.array(
                [1.0 if k < shorter or options.ld_alpha is None else options.ld_alpha for k in range(len(rows))]
            )
            reference_alpha = np.ones(len(rows)) if options.compat == "ms-swift" else alpha
            ratio.append((w[rows] * (alpha * logp[rows] - reference_alpha * ref[rows])).sum())
            v.append(np.exp((w[rows] * (logp[rows] - np.log((p[rows] ** 2).sum(1)))).sum() / w[rows].sum()))
        total += cdpo(options.beta * (ratio[0] - ratio[1]), options.label_smoothing) * (
            v[0] * v[1] if options.wpo else 1
        )
        nll -= (w[places_of[0]] * logp[places_of[0]]).sum()
    return total / PAIRS + options.rpo_alpha * nll / sequences.step["chosen_tokens"]


@pytest.mark.parametrize("compat", ["ours", "trl", "ms-swift"])
@pytest.mark.parametrize("name", ["sigmoid", "ld", "wpo"])
def test_sums_over_tokens(name, compat):
    options = replace(OBJECTIVES[name], compat=compat, label_smoothing=0.0)
    batch, hidden, head = prepared(options)
    terms = objective(options)(hidden, head, batch)
    assert terms.loss_sum.item() / terms.weight == pytest.approx(independent(options), rel=1e-10)


def shared(names: list[str]) -> list[dict]:
    """Each rank has every other target of all sequences, as context parallelism would cut them."""
    axis = build_mesh(Degrees(ring=2), "cpu")["cp"]
    results = []
    for name in names:
        options = OBJECTIVES[name]
        batch, hidden, head = prepared(options)
        assert batch.sequences is not None
        keep = torch.arange(len(hidden)) % 2 == axis.rank
        mine = replace(batch.sequences, target=batch.sequences.target[keep], counted=axis.rank == 0)
        states = hidden.clone().requires_grad_()
        terms = objective(options, axis)(states[keep], head, cut(batch, keep, mine))
        (terms.loss_sum / PAIRS).backward()
        numbers = {name: float(value) for name, value in terms.sums.items()}
        results.append(
            {"loss": terms.loss_sum.item(), "weight": terms.weight, "hidden": states.grad, "sums": numbers}
            | {"head": head.module.weight.grad, "counts": terms.counts}
        )
    return results


def test_sequences_shared_by_ranks():
    names = list(OBJECTIVES)
    ranks = on_ranks(2, shared, names)
    for number, name in enumerate(names):
        options = OBJECTIVES[name]
        batch, hidden, head = prepared(options)
        states = hidden.clone().requires_grad_()
        terms = objective(options)(states, head, batch)
        (terms.loss_sum / PAIRS).backward()
        found = [rank[number] for rank in ranks]
        assert sum(f["loss"] for f in found) == pytest.approx(terms.loss_sum.item(), rel=1e-11), name
        assert sum(f["weight"] for f in found) == terms.weight
        torch.testing.assert_close(found[0]["hidden"] + found[1]["hidden"], states.grad, msg=name)
        torch.testing.assert_close(found[0]["head"] + found[1]["head"], head.module.weight.grad, msg=name)
        for metric, value in terms.sums.items():
            assert sum(f["sums"][metric] for f in found) == pytest.approx(float(value), rel=1e-10, abs=1e-12), metric
            assert sum(f["counts"][metric] for f in found) == terms.counts[metric]


def test_places():
    assert places(torch.tensor([0, 0, 2, 2, 2, 1])).tolist() == [0, 1, 0, 1, 2, 0]
    assert places(torch.tensor([1, 0, 1, 0])).tolist() == [0, 0, 1, 1]
