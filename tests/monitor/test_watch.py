"""Watches over logged lines: they tell what goes wrong, once, and leave healthy runs alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swift.commands.rlhf import rlhf
from swift.config.training import MonitorConfig
from swift.monitor import build_monitor, read_history
from swift.monitor.watch import make_watches

Line = tuple[int, dict[str, Any]]


def told(lines: Iterable[Line]) -> list[str]:
    """What all watches say of a run's lines."""
    watches = make_watches()
    return [words for step, line in lines for watch in watches if (words := watch.log(step, line)) is not None]


def steps(count: int, every: int = 5) -> list[int]:
    return [1, *range(every, count + 1, every)]


def pairs(step: int, chosen: float, rejected: float, *, level: float = -200.0, **more: Any) -> Line:
    """A line of DPO whose log-ratios to the reference are these."""
    line = {
        "logps/ref_chosen": level,
        "logps/ref_rejected": level + 20,
        "logps/chosen": level + chosen,
        "logps/rejected": level + 20 + rejected,
        "rewards/chosen": 0.1 * chosen,
        "rewards/rejected": 0.1 * rejected,
        "rewards/margins": 0.1 * (chosen - rejected),
        "rewards/accuracies": 0.0 if step == 1 else min(0.99, 0.5 + step / 200),
        "learning_rate": 1e-5,
    }
    return step, {**line, **more}


def without_reference(line: Line, rewards: tuple[float, float]) -> Line:
    """The same for a method that compares log-probabilities themselves."""
    step, values = line
    chosen, rejected = rewards
    values = {name: value for name, value in values.items() if "/ref_" not in name}
    return step, values | {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}


def test_both_answers_falling_is_told_once_with_numbers_and_a_way_out():
    (warning,) = told(pairs(step, -0.2 * (step - 1), -0.5 * (step - 1)) for step in steps(400))
    # chosen answers are 5 % of 200 nats lower, averaged over five lines, first at step 65
    shares = [sum(0.2 * (s - 1) for s in range(step - 20, step + 1, 5)) / 5 for step in range(25, 105, 5)]
    first = next(step for step, nats in zip(range(25, 105, 5), shares, strict=True) if nats >= 10)
    lower, rejected = (rate * np.mean([s - 1 for s in range(first - 20, first + 1, 5)]) for rate in (0.2, 0.5))
    assert warning.startswith(f"step {first}: ")
    assert "likelihood displacement" in warning
    assert f"chosen ones is {lower:.1f} (5%) lower than the reference's" in warning
    assert f"rejected ones {rejected:.1f} ({rejected / 180:.0%})" in warning
    for flag in ("--rpo_alpha", "--loss_type apo_zero", "--beta", "--learning_rate"):
        assert flag in warning


HEALTHY = {
    "chosen rises": (0.2, -0.4),
    "chosen falls a little": (-0.012, -0.4),
    "both fall, the rejected less": (-0.3, -0.2),
    "both rise": (0.3, 0.1),
    "nothing moves": (0.0, 0.0001),
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("with_reference", [True, False])
def test_no_alarm_on_a_healthy_run(name: str, with_reference: bool):
    chosen, rejected = HEALTHY[name]
    for seed in range(20):
        noise = np.random.default_rng(seed)
        lines = []
        for step in steps(600):
            level = -200.0 + noise.normal(0, 20)  # answers of a batch are longer or shorter
            moved = [0.0 if step == 1 else rate * step + noise.normal(0, 1) for rate in (chosen, rejected)]
            line = pairs(step, *moved, level=level)
            rewards = tuple(0.1 * (-200 + rate * step + noise.normal(0, 4)) for rate in (chosen, rejected))
            lines.append(line if with_reference else without_reference(line, rewards))
        assert told(lines) == []


def test_an_answer_of_few_nats_may_lose_half_a_nat():
    assert told(pairs(step, -0.001 * step, -0.004 * step, level=-5.0) for step in steps(500)) == []
    assert told(pairs(step, -0.006 * step, -0.01 * step, level=-5.0) for step in steps(500))


def test_what_is_within_the_scatter_of_the_lines_is_not_told():
    for seed in range(20):
        noise = np.random.default_rng(seed)
        moved = [(0.0, 0.0), *((noise.normal(-6, 40), noise.normal(-40, 40)) for _ in range(5, 105, 5))]
        assert told(pairs(step, *ratios) for step, ratios in zip(steps(100), moved, strict=True)) == []


def test_without_a_reference_the_start_is_what_counts():
    """SimPO's rewards are per token: they scatter less than sums, whose level changes with the answers' lengths."""
    noise = np.random.default_rng(0)

    def run(fall: float) -> list[str]:
        lines = []
        for step in steps(300):
            lengths = noise.uniform(80, 120)
            means = -1.5 - fall * step / 300, -1.6 - 2 * fall * step / 300
            values = {f"logps/{name}": mean * lengths for name, mean in zip(("chosen", "rejected"), means, strict=True)}
            rewards = [2 * mean + noise.normal(0, 0.01) for mean in means]
            line = {"rewards/chosen": rewards[0], "rewards/rejected": rewards[1], "rewards/accuracies": 0.8}
            lines.append((step, {**values, **line, "rewards/margins": rewards[0] - rewards[1]}))
        return lines

    assert told(run(0.02)) == []
    (warning,) = told(run(0.3))
    found = re.search(r"chosen ones is ([\d.]+) \((\d+)%\) lower than at the start", warning)
    assert found and 100 * 1.5 * 0.05 <= float(found[1]) < 100 * 1.5 * 0.08 and int(found[2]) in (5, 6, 7)
    assert "--cpo_alpha" in warning and "--rpo_alpha" not in warning


def test_another_model_as_reference_is_no_fall():
    """Log-ratios that begin far from 0 are compared with where they began."""

    def lines(fall: float) -> list[Line]:
        return [pairs(step, -50 - fall * step, -60 - 3 * fall * step) for step in steps(400)]

    assert told(lines(0.0)) == []
    (warning,) = told(lines(0.1))
    assert "lower than at the start" in warning


@pytest.mark.parametrize(
    ("more", "flag", "not_flag"),
    [({"nll": 2.0}, "Raise --rpo_alpha", "apo_zero"), ({"rewards/margins": None}, "--desirable_weight", "--rpo_alpha")],
)
def test_the_way_out_fits_the_method(more: dict[str, Any], flag: str, not_flag: str):
    (warning,) = told(pairs(step, -0.2 * step, -0.5 * step, **(more if step > 1 else {})) for step in steps(200))
    assert flag in warning and not_flag not in warning


def test_lines_with_one_kind_of_answers_and_broken_numbers_are_taken_as_they_are():
    """KTO's steps may hold no rejected row, and a number may not be finite."""
    lines = []
    for step in steps(400):
        _, line = pairs(step, -0.2 * (step - 1), -0.5 * (step - 1))
        missing = "chosen" if step % 10 else "rejected"
        line = {n: v for n, v in line.items() if not n.endswith(missing) or step == 1}
        lines += [(step, line), (step, {"logps/chosen": math.nan, "logps/ref_chosen": None, "rewards/chosen": 1.0})]
    (warning,) = told(lines)
    assert "displacement" in warning


def accuracy_lines(accuracies: Iterable[float], margins: Iterable[float], **more: Any) -> list[Line]:
    lines = zip(steps(5000), accuracies, margins, strict=False)
    return [(s, {"rewards/accuracies": a, "rewards/margins": m, "learning_rate": 1e-4, **more}) for s, a, m in lines]


def test_an_accuracy_that_stays_at_chance():
    noise = np.random.default_rng(0)
    accuracies, margins = noise.binomial(40, 0.5, 100) / 40, noise.normal(0, 0.01, 100)
    margins[0] = 0
    (warning,) = told(accuracy_lines(accuracies, margins))
    assert "stays at chance (0.5" in warning or "stays at chance (0.4" in warning
    assert int(re.findall(r"step (\d+)", warning)[0]) >= 200
    # a reward model has no reference, and no log-probabilities
    margins = noise.normal(0.3, 0.01, 100)
    (warning,) = told(accuracy_lines(accuracies, margins))
    assert "stays at chance" in warning
    # log-probabilities without a reference say which answer is shorter
    assert told(accuracy_lines(accuracies, margins, **{"logps/chosen": -100.0, "logps/rejected": -110.0})) == []


def test_slow_learning_and_a_warm_up_are_not_at_chance():
    for seed in range(20):
        noise = np.random.default_rng(seed)
        margins = noise.normal(np.linspace(0.1, 0.3, 200)[:, None], 1, (200, 40))  # 54 % to 62 % are right
        accuracies = (margins > 0).mean(1)
        assert told(accuracy_lines([0, *accuracies], [0, *margins.mean(1)])) == []
        # at a learning rate that still rises nothing can be seen, however long it takes
        lines = accuracy_lines(noise.binomial(40, 0.5, 100) / 40, [0, *noise.normal(0, 0.01, 99)])
        assert told((step, line | {"learning_rate": 1e-8 * step}) for step, line in lines) == []
        for warning in told((step, line | {"learning_rate": 1e-8 * min(step, 250)}) for step, line in lines):
            assert int(re.findall(r"step (\d+)", warning)[0]) >= 450


def test_pairs_that_can_be_told_apart_at_once():
    (warning,) = told(accuracy_lines([0, *[1.0] * 30], [0, *np.linspace(0.1, 3, 30)]))
    assert "has been 1 from the start" in warning and warning.startswith("step 25")
    assert told(accuracy_lines([0, 0.9, *[1.0] * 30], [0, *np.linspace(0.1, 3, 31)])) == []


def test_margins_that_are_nothing_at_all():
    (warning,) = told(accuracy_lines([0.0] * 50, [0.0] * 50))
    assert "exactly 0 in every line" in warning
    assert told(accuracy_lines([0.0] * 12 + [0.9] * 40, [0.0] * 12 + [0.5] * 40)) == []


def test_a_reference_point_stuck_at_zero():
    lines = [(step, {"kto_z0": 0.0 if step >= 100 else 0.5, "learning_rate": 1e-5}) for step in steps(400)]
    (warning,) = told(lines)
    assert warning.startswith("step 300: kto_z0 has been 0 since step 100") and "--desirable_weight" in warning
    assert told((step, line | {"kto_z0": 0.01 if step % 190 == 0 else 0.0}) for step, line in lines) == []


def fall(step: int) -> Line:
    return pairs(step, -0.2 * (step - 1), -0.5 * (step - 1))


def monitored(folder: Path, lines: Iterable[Line], resume_at: int | None = None) -> list[tuple[int, str]]:
    """Run the monitor over lines; the warnings in its history."""
    monitor = build_monitor(MonitorConfig(report_to=["none"]), folder, rank=0)
    if resume_at is not None:
        monitor.resume_at(resume_at)
    monitor.start({"total_steps": 200})
    for step, line in lines:
        monitor.log(step, line)
    monitor.close()
    return [(record["step"], record["message"]) for record in read_history(folder) if record.get("event") == "warning"]


def test_every_run_is_watched_and_a_resumed_one_as_if_it_had_not_stopped(tmp_path: Path, capsys):
    (whole,) = monitored(tmp_path / "whole", map(fall, steps(200)))
    assert f"warning: {whole[1]}" in capsys.readouterr().out
    for stop in (whole[0] - 10, whole[0] + 10):  # before it was told, and after
        folder = tmp_path / f"stopped at {stop}"
        monitored(folder, map(fall, steps(stop + 5)))
        rest = [step for step in steps(200) if step > stop]
        assert monitored(folder, map(fall, rest), resume_at=stop) == [whole]


def test_a_real_run(tiny_model_dir: Path, write_rows: Any, tmp_path: Path):
    """apo_down lowers both answers by its formula, apo_zero raises the chosen one."""
    words = ["paris", "rain", "seven", "music", "river", "stone"]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Question {i}?"},
                {"role": "assistant", "content": f"Answer {words[i % 6]} {words[i % 5]}"},
            ],
            "rejected_response": f"No, {words[i % 5]}",
        }
        for i in range(32)
    ]
    flags: dict[str, Any] = {
        "model": str(tiny_model_dir), "dataset": [str(write_rows(tmp_path / "pairs.jsonl", rows))], "max_steps": 16,
        "logging_steps": 2, "learning_rate": 3e-3, "tuner_type": "full", "per_device_train_batch_size": 8,
        "torch_dtype": "float32", "save_strategy": "no", "report_to": ["none"], "add_version": False,
    }  # fmt: skip
    displaced = {}
    for name in ("apo_down", "apo_zero"):
        rlhf(**flags, loss_type=[name], output_dir=str(tmp_path / name))
        records = [json.loads(line) for line in (tmp_path / name / "logging.jsonl").read_text().splitlines()]
        warned = [record for record in records if "displacement" in record.get("message", "")]
        last = next(record for record in reversed(records) if "logps/chosen" in record)
        displaced[name] = bool(warned)
        assert (last["logps/chosen"] < last["logps/ref_chosen"]) is (name == "apo_down")
        page = (tmp_path / name / "report.html").read_text()
        assert "log-probability of answers" in page and ("likelihood displacement" in page) is displaced[name]
    assert displaced == {"apo_down": True, "apo_zero": False}
