"""Replicas of a sharded model that exchange gradients in our own ways: sums, bytes, what is remembered, refusals."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from equality import Outcome, Tiny, assert_equal, build, make_batches, make_optimizer, single_process, whole_tensor
from pool import on_ranks
from runs import BASE, command, environment, read_log

from swift.config.degrees import Degrees
from swift.config.parallel import ParallelConfig
from swift.config.training import ObjectiveConfig
from swift.core.errors import UsageError
from swift.distributed.compression import build_replica_exchange
from swift.distributed.compression.methods import num_sent
from swift.distributed.mesh import Axis, build_mesh
from swift.distributed.sharding import apply_fsdp, sharded_modules
from swift.distributed.spread import Spread
from swift.distributed.traffic import TRAFFIC
from swift.optim.local import LocalParameters
from swift.training.parallelize import Making, SpreadModel, make_strategy, spread_model
from swift.training.precision import Precision
from swift.training.strategy import Strategy

HYBRID = Degrees(dp_replicate=2, dp_shard=2)
WHOLE = '{"inter": "none"}'
TOP = '{"inter": "topk", "ratio": 0.1}'
MICRO_BATCHES = 8  # of all ranks in a step: two on each of four, the first of which must wait for the second


@dataclass
class Case:
    degrees: Degrees = HYBRID
    way: str | None = WHOLE
    kind: str = "tied"
    tuner: str = "full"
    rows: str = "packed"
    settings: dict = field(default_factory=dict)


class Trained:
    """A spread model with what runs steps on it."""

    def __init__(self, case: Case) -> None:
        sizes = case.degrees
        config = ParallelConfig(
            fsdp="hsdp",
            tensor_parallel_size=sizes.tp,
            sequence_parallel_size=sizes.cp,
            expert_parallel_size=sizes.ep,
            grad_compression=case.way,
            **case.settings,
        )
        making = Making(config, ObjectiveConfig(), Precision(torch.float32, "cpu"))

        def make():
            tiny: Tiny = build(case.kind, case.tuner)
            return tiny.whole, tiny.causal_lm

        self.model: SpreadModel = spread_model(make, build_mesh(sizes, "cpu"), making)
        self.strategy: Strategy = make_strategy(self.model, making)
        self.local: LocalParameters = self.model.local
        self.optimizer = make_optimizer([part for _, part in self.local.named()])
        axis = self.strategy.mesh["dp"]
        batches = make_batches(case.rows, MICRO_BATCHES)
        self.mine, self.weight = batches[axis.rank :: axis.size], sum(batch.weight for batch in batches)

    def backward(self) -> float:
        """Gradients of a step; the loss of all ranks."""
        loss, portions = 0.0, self.strategy.prepare(self.mine)
        to_loss = lambda loss_sum: loss_sum / self.weight  # noqa: E731
        for number, portion in enumerate(portions):
            last = number == len(portions) - 1
            terms = self.strategy.forward(portion, to_loss, last)
            loss += sum(float(term.loss_sum.detach()) for term in terms)
            self.strategy.backward(terms, to_loss, last)
        total = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / self.strategy.copies / self.weight

    def step(self) -> None:
        self.strategy.clip(0.0)
        self.strategy.step(self.optimizer, None)

    def gradients(self) -> dict[str, torch.Tensor]:
        pairs = self.local.named_whole()
        return {name: whole_tensor(p.grad).clone() for name, p in pairs if p.grad is not None}

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: whole_tensor(p.detach()).clone() for name, p in self.local.named_whole()}


def train(case: Case, steps: int = 3) -> Outcome:
    run, outcome = Trained(case), Outcome()
    for step in range(steps):
        outcome.losses.append(run.backward())
        if step == 0:
            outcome.gradients = run.gradients()
        run.step()
    outcome.weights = run.weights()
    return outcome


CASES = {
    "stage 3": Case(),
    "stage 2, lora": Case(kind="gqa", tuner="lora", rows="padded", settings={"zero_stage": 2}),
    "stage 1": Case(kind="untied", settings={"zero_stage": 1}),
    "offloaded": Case(settings={"fsdp_cpu_offload": True}),
    "all elements": Case(way='{"inter": "topk", "ratio": 1}', kind="qk_norm"),
    "sequences": Case(Degrees(dp_replicate=2, ring=2), kind="gqa"),
    "experts": Case(Degrees(dp_replicate=2, dp_shard=2, ep=2), kind="moe"),
}
SLOW = {
    "matrices": Case(Degrees(dp_replicate=2, dp_shard=2, tp=2), kind="gqa", settings={"sequence_parallel": True}),
    "experts further cut": Case(Degrees(dp_replicate=2, dp_shard=4, ep=2), kind="moe", tuner="lora"),
    "three replicas": Case(Degrees(dp_replicate=4, dp_shard=2), kind="untied"),
}


@pytest.mark.parametrize(
    "case",
    [*CASES.values(), *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW.values())],
    ids=[*CASES, *SLOW],
)
def test_what_loses_nothing_is_equal_to_one_process(case: Case):
    expected = single_process(case.kind, case.tuner, case.rows, count=MICRO_BATCHES)
    for outcome in on_ranks(case.degrees.world_size, train, case):
        assert_equal(outcome, expected)


# way -> most of the plain way's progress that it may lack after so few steps. At the same learning rate.
LACKS = {TOP: 0.5, '{"inter": "bf16"}': 0.01}


def learn() -> dict[str | None, Outcome]:
    return {way: train(Case(way=way), 6) for way in (None, *LACKS)}


def test_learns_about_as_much_with_less_and_replicas_stay_equal():
    first, *others = on_ranks(4, learn)
    start, *_, end = first[None].losses
    assert start - end > 1, "the model learns nothing, so there is nothing to compare"
    for way, lack in LACKS.items():
        ours = first[way]
        assert ours.losses[0] == pytest.approx(start, rel=1e-6) and ours.losses != first[None].losses
        assert ours.losses[-1] - end < lack * (start - end), way
        for other in others:
            assert all(torch.equal(weight, other[way].weights[name]) for name, weight in ours.weights.items()), way


def sent(way: str | None, stage: int) -> tuple[dict, float, float]:
    """Bytes by axis and kind in a step of two micro-batches a rank; of all gradients; and as top-k makes them."""
    run = Trained(Case(way=way, settings={"zero_stage": stage}))
    run.backward()
    TRAFFIC.reset()
    run.backward()
    units = sharded_modules(run.model.modules[0])
    owned, shares = set(), []
    for unit in reversed(units):  # inner ones first: the root has what is left
        own = [p for p in unit.parameters() if p not in owned]
        owned.update(own)
        shares.append(sum(-(-p.shape[0] // 2) * p.shape[1:].numel() for p in own))
    return dict(TRAFFIC.bytes), 4.0 * sum(shares), 8.0 * sum(num_sent(share, 0.1) for share in shares)


@pytest.mark.parametrize(("way", "stage"), [(None, 3), (WHOLE, 1), (TOP, 3), ('{"inter": "fp16"}', 2)])
def test_goes_across_replicas_once_a_step(way: str | None, stage: int):
    for counted, whole, top in on_ranks(4, sent, way, stage):
        expected = {None: whole, WHOLE: whole, '{"inter": "fp16"}': whole / 2, TOP: top}[way]
        assert sum(n for (axis, _), n in counted.items() if axis == "dp_replicate") == expected
        assert counted["fsdp", "reduce_scatter"] == whole * (1 if stage == 1 else 2)


def in_order() -> list[str]:
    run, events = Trained(Case()), []
    replicas, decoder = run.model.spread.replicas, run.model.chunks[0].causal_lm.model
    add_up = replicas.method.add_up

    class Watched:
        def add_up(self, share, key):
            events.append(f"exchange {key}")
            add_up(share, key)

    def watch(module, arguments, hidden):
        hidden.register_hook(lambda _: events.append("backward of the first layer begins"))

    replicas.method = Watched()
    decoder.layers[0].register_forward_hook(watch)
    run.backward()
    return events


def test_the_last_layers_are_exchanged_before_backward_reaches_the_first():
    for events in on_ranks(4, in_order):
        first, second = (i for i, event in enumerate(events) if event.startswith("backward"))
        layers = [f"exchange model.model.layers.{number}" for number in (3, 2, 1)]
        assert [events.index(layer) > first for layer in layers] == [True] * 3  # not with the first micro-batch
        assert events.index(layers[0]) < second < events.index("exchange model.model.layers.0")
        assert sum(event.startswith("exchange") for event in events) == 4 + 1


def remembered() -> tuple[float, float, float]:
    """Sums over five steps at the same weights: of what all ranks had, less what came out, less what is left."""
    exact, ours = Trained(Case()), Trained(Case(way=TOP))
    lost = {name: torch.zeros(()).double() for name, _ in ours.local.named_whole()}
    for _ in range(5):
        exact.backward()
        ours.backward()
        for (name, a), (_, b) in zip(exact.local.named(), ours.local.named(), strict=True):
            lost[name] += (a.grad.double() - b.grad.double()).sum()
    kept = sum(tensor.double().sum() for tensor in ours.model.spread.replicas.method.residuals.values())
    total = torch.stack([kept])
    dist.all_reduce(total, group=ours.strategy.mesh["dp_replicate"].group)
    away = sum(lost.values())
    return float(away), float(total), float(sum(abs(value) for value in lost.values()))


def test_what_was_not_sent_is_remembered():
    for away, kept, least in on_ranks(4, remembered):
        assert abs(away - kept) < 1e-5 * least and abs(kept) > 1e-3 * least > 0


def put_back(restored: bool) -> tuple[bool, bool]:
    """Whether the third step's gradients are those of a run that was not interrupted."""
    whole, cut = Trained(Case(way=TOP)), Trained(Case(way=TOP))
    for step in range(3):
        if step == 2:
            state = {key: list(value) for key, value in cut.model.spread.replicas.state_dict().items()}
            cut.model.spread.replicas.load_state_dict({"keys": [], "residuals": []})
            if restored:
                cut.model.spread.replicas.load_state_dict(state)
        losses = [run.backward() for run in (whole, cut)]
        ours, theirs = (run.gradients() for run in (cut, whole))
        whole.step()
        cut.step()
    return losses[0] == losses[1], all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("restored", [True, False])
def test_what_is_remembered_can_be_put_back(restored: bool):
    assert on_ranks(4, put_back, restored) == [(True, restored)] * 4


@pytest.mark.parametrize(
    "way", ["bf16", "topk", '{"intra": "bf16", "inter": "topk"}', '{"inter": "fp16", "node_size": 2}']
)
def test_only_what_goes_across_can_be_chosen(way: str):
    with pytest.raises(UsageError, match="only what goes across replicas"):
        build_replica_exchange(way, Axis("dp_replicate"))


def nothing_sharded() -> None:
    tiny, spread = build("tied"), Spread(build_mesh(Degrees(dp_replicate=2), "cpu"))
    config = ParallelConfig(fsdp="hsdp", grad_compression=TOP)
    with pytest.raises(UsageError, match="nothing is sharded"):
        apply_fsdp(tiny.train_module(), tiny.causal_lm, spread, config, compute=torch.float32)
    dist.barrier()


def test_replicas_of_one_process_are_refused():
    on_ranks(2, nothing_sharded)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_with_what_was_not_sent(tiny_model_dir, chat_rows, write_rows, tmp_path):
    """The real command on four processes: interrupted, then whole; and in another layout, which says what is lost."""
    data = write_rows(tmp_path / "rows.jsonl", chat_rows(40))
    flags = {
        **BASE,
        "model": str(tiny_model_dir),
        "dataset": [str(data)],
        "lr_scheduler_type": "constant",
        "nproc_per_node": 4,
        "fsdp": "hsdp",
        "dp_shard_size": 2,
        "grad_compression": TOP,
        "max_steps": 4,
        "save_steps": 2,
    }

    def run(folder: str, **more: object) -> tuple[Path, str]:
        where = tmp_path / folder
        words = command({**flags, "output_dir": str(where), **more})
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return where, done.stdout + done.stderr

    whole, said = run("whole")
    assert "the largest 10 % with error feedback across 2 replicas" in " ".join(said.split())
    log = read_log(whole)
    for folder in ("cut", "moved"):
        shutil.copytree(whole, tmp_path / folder)
    cut, said = run("cut", resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
    assert read_log(cut)[-2:] == log[-2:] and "still to be sent" not in said
    fewer = {"nproc_per_node": 2, "dp_shard_size": 1, "fsdp": "none"}
    _, said = run("moved", resume_from_checkpoint=str(tmp_path / "moved" / "checkpoint-2"), **fewer)
    assert "gradients that were still to be sent are lost" in " ".join(said.split())
