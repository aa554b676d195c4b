"""Ranks that step alone: what they agree on, what they send, what they learn, and how a run goes on."""

import json
import subprocess

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from runs import BASE, assert_same_bits, command, environment, read_log, trained
from toy import build_toy, measure, sentences

from swift.config.communication import read_local_updates
from swift.core.errors import UsageError
from swift.distributed.mesh import Axis
from swift.distributed.traffic import TRAFFIC
from swift.training.local_updates import LocalSteps, cut_into_fragments

STEPS = 100
# way -> most that the loss of the shared weights may be above that of an all-reduce every step. At the same inner rate.
GAPS = {
    '{"method": "local_sgd", "every": 8}': 0.1,
    '{"method": "diloco", "every": 20}': 0.25,
    '{"method": "diloco", "every": 20, "dtype": "bfloat16"}': 0.25,
    '{"method": "streaming_diloco", "every": 20, "fragments": 2}': 0.35,
    '{"method": "streaming_diloco", "every": 20, "fragments": 2, "delay": 2}': 0.35,
}


def axis_of_all() -> Axis:
    size = dist.get_world_size()
    return Axis("dp", size, dist.get_rank(), dist.new_group()) if size > 1 else Axis("dp")


def train(way: str | None, steps: int, *, inner=torch.optim.AdamW, rate: float = 1e-2) -> dict:
    """The shared weights after some steps and their loss; bytes sent; without `way`, gradients are averaged."""
    model = build_toy()
    optimizer = inner(model.parameters(), lr=rate)
    local = (
        LocalSteps(read_local_updates(way), dict(model.named_parameters()), optimizer, axis_of_all()) if way else None
    )
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    TRAFFIC.reset()
    for step in range(steps):
        model(sentences(8, generator)).backward()
        if local is None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        if local is not None:
            local.after_step(step + 1, ending=step + 1 == steps)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"loss": measure(model), "weights": weights, "sent": TRAFFIC.per_axis().get("dp", 0.0)}


def learn(ways: list[str | None]) -> list[dict]:
    return [train(way, STEPS) for way in ways]


@pytest.fixture(scope="module")
def learnt() -> dict:
    ways = [None, *GAPS]
    ranks = on_ranks(4, learn, ways, timeout_s=280)
    return {way: [rank[number] for rank in ranks] for number, way in enumerate(ways)}


@pytest.mark.parametrize("way", GAPS)
def test_learns_about_as_much_as_with_gradients_exchanged_every_step(learnt, way):
    plain, ours = learnt[None][0]["loss"], learnt[way][0]["loss"]
    assert plain < 1.5, "the toy learns nothing, so there is nothing to compare"
    assert ours <= plain + GAPS[way], f"{ours} after {plain}"


@pytest.mark.parametrize("way", GAPS)
def test_all_ranks_end_with_the_same_weights(learnt, way):
    first, *others = learnt[way]
    assert all(torch.equal(first["weights"], other["weights"]) for other in others)


@pytest.mark.parametrize("way", GAPS)
def test_sends_as_many_bytes_as_predicted(learnt, way):
    settings = read_local_updates(way)
    whole = 2 * 3 / 4 * sum(p.numel() for p in build_toy().parameters()) * (2 if settings.dtype == "bfloat16" else 4)
    # a fragment's first exchange comes after a whole period, counted from its turn; all of them meet at the end
    parts = cut_into_fragments([n for n, _ in build_toy().named_parameters()], settings.fragments)
    sizes = dict(build_toy().named_parameters())
    expected = 0.0
    for number, names in enumerate(parts):
        offset = number * settings.every // settings.fragments
        times = len(
            [s for s in range(1, STEPS + 1) if s == STEPS or (s > offset and (s - offset) % settings.every == 0)]
        )
        share = sum(sizes[n].numel() for n in names) / sum(p.numel() for p in sizes.values())
        expected += times * share * whole
    assert learnt[way][0]["sent"] == pytest.approx(expected)


def plain_and_local() -> tuple[float, float]:
    plain = train(None, 5, inner=torch.optim.SGD, rate=0.5)["weights"]
    local = train('{"method": "local_sgd", "every": 1}', 5, inner=torch.optim.SGD, rate=0.5)["weights"]
    start = torch.cat([p.detach().flatten() for p in build_toy().parameters()])
    return float((plain - local).norm() / plain.norm()), float((plain - start).norm() / plain.norm())


def test_local_sgd_every_step_is_the_usual_step():
    for difference, moved in on_ranks(2, plain_and_local):
        assert difference < 1e-6 and moved > 1e-3


def one_outer_step(settings: str, own: list[list[float]], steps: int) -> list[list[float]]:
    """Own and shared weight after each step; `own` is where the inner optimizer puts the rank's weight each time."""
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    local = LocalSteps(read_local_updates(settings), {"w": weight}, torch.optim.SGD([weight], lr=1.0), axis_of_all())
    seen = []
    for step in range(1, steps + 1):
        with torch.no_grad():
            weight += own[dist.get_rank()][step - 1]
        local.after_step(step)
        with local.shared_weights():
            shared = weight.item()
        seen.append([weight.item(), shared])
    return seen


def test_outer_steps_are_those_of_the_paper():
    """DiLoCo with two ranks, by hand: differences -1 and -3 on average -2, then -1 and -1."""
    settings = '{"method": "diloco", "every": 2, "outer_lr": 0.5, "outer_momentum": 0.5}'
    moves = [[0.5, 0.5, 0.5, 0.5], [1.0, 2.0, 0.0, 1.0]]
    first, second = on_ranks(2, one_outer_step, settings, moves, 4)
    # v = -2, shared = 1 + 0.5 (2 + 0.5 x 2) = 2.5; then d = -1, v = -1 - 1 = -2, shared = 2.5 + 0.5 (1 + 0.5 x 2) = 3.5
    assert first == [[1.5, 1.0], [2.5, 2.5], [3.0, 2.5], [3.5, 3.5]]
    assert second == [[2.0, 1.0], [2.5, 2.5], [2.5, 2.5], [3.5, 3.5]]


def test_a_late_result_is_merged_with_what_was_done_meanwhile():
    settings = '{"method": "diloco", "every": 2, "outer_lr": 1.0, "outer_momentum": 0, "delay": 1, "alpha": 0.25}'
    moves = [[1.0, 1.0, 1.0], [0.0, 4.0, 0.0]]
    first, second = on_ranks(2, one_outer_step, settings, moves, 3)
    # at step 2 they are at 3 and 5, on average 4; at step 3, at 4 and 5: a quarter of that and three of 4
    assert [own for own, _ in first] == [2.0, 3.0, 4.0] and [own for own, _ in second] == [1.0, 5.0, 4.25]
    assert [shared for _, shared in first] == [1.0, 1.0, 4.0]


def interrupted(way: str, stop: int) -> list[bool]:
    """Whether a run that is saved and put back after `stop` steps ends with the same bits."""
    ends = []
    for cut in (False, True):
        model = build_toy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        local = LocalSteps(read_local_updates(way), dict(model.named_parameters()), optimizer, axis_of_all())
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(10):
            if cut and step == stop:
                with local.shared_weights():
                    state, shared = local.state_dict(), {n: t.clone() for n, t in model.state_dict().items()}
                model = build_toy(seed=9)
                model.load_state_dict(shared)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                local = LocalSteps(read_local_updates(way), dict(model.named_parameters()), optimizer, axis_of_all())
                local.load_state_dict(state)
            model(sentences(4, generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
            local.after_step(step + 1, ending=step == 9)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return [torch.equal(*ends)]


@pytest.mark.parametrize("stop", [5, 7])  # between outer steps; while an exchange is under way
def test_goes_on_exactly_where_it_stopped(stop):
    way = '{"method": "streaming_diloco", "every": 6, "fragments": 2, "delay": 2}'
    assert on_ranks(2, interrupted, way, stop) == [[True], [True]]


def test_fragments_are_strided_layers():
    names = ["embed.weight", "m.layers.0.q.weight", "m.layers.0.k.weight", "m.layers.1.q.weight", "norm.weight"]
    assert cut_into_fragments(names, 2) == [[names[0], names[3]], [names[1], names[2], names[4]]]
    with pytest.raises(UsageError, match="5 fragments can't be made of 4 layers"):
        cut_into_fragments(names, 5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_a_run_of_two_processes_resumes_exactly(tuner, tiny_model_dir, chat_rows, write_rows, tmp_path):
    """The real command: interrupted between two outer steps, then whole; same log, same weights."""
    data = write_rows(tmp_path / "rows.jsonl", chat_rows(30))
    flags = {
        **BASE,
        "model": str(tiny_model_dir),
        "dataset": [str(data)],
        "tuner_type": tuner,
        "lr_scheduler_type": "constant",  # so that it does not matter how long a run is
        "nproc_per_node": 2,
        "max_steps": 6,
        "save_steps": 3,
        "local_updates": json.dumps({"method": "diloco", "every": 2, "delay": 1}),
    }

    def run(**more) -> str:
        done = subprocess.run(
            command({**flags, **more}), env=environment(), capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(output_dir=str(whole))
    run(output_dir=str(cut), max_steps=4)
    # the first run ended at 4 steps and brought its ranks together there: the checkpoint of step 3 is in mid-course
    run(output_dir=str(cut), resume_from_checkpoint=str(cut / "checkpoint-3"))
    assert read_log(whole)[-3:] == read_log(cut)[-3:]
    assert_same_bits(trained(whole / "checkpoint-6"), trained(cut / "checkpoint-6"))
    lines = [json.loads(line) for line in (whole / "logging.jsonl").read_text().splitlines()]
    sent = [line.get("sent_mib/dp", 0) for line in lines if "grad_norm" in line]
    assert sent[0] == 0 and sent[1] > 0
