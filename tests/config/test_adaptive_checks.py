"""Faults of the settings of adaptive inference, and how layers are named there."""

from __future__ import annotations

import pytest

from swift.config import InferConfig, build_config
from swift.config.adaptive_checks import read_skip
from swift.config.checks import find_problems

FAST = {"adaptive": True, "adaptive_latency_ms": 30}


def faults(**values) -> list[str]:
    return [problem.message for problem in find_problems(build_config(InferConfig, {"model": "smollm2", **values}))]


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n")
    return str(path)


def test_what_can_be_meant(rows):
    assert faults(**FAST) == []
    assert (
        faults(**FAST, adaptive_eval_file=rows, adaptive_siblings=["a"], adaptive_skip_layers=["last:2", "3,4"]) == []
    )
    assert faults(**FAST, adaptive_eval_file=f"{rows}#5") == []
    assert faults(skip_layers=[3, 4]) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"adaptive": True}, "adaptive needs to know what is fast enough"),
        ({"adaptive_latency_ms": 30}, "adaptive_latency_ms does nothing without adaptive"),
        ({"adaptive_siblings": ["a"]}, "adaptive_siblings does nothing without adaptive"),
        ({**FAST, "adaptive_latency_ms": 0}, "adaptive_latency_ms must be above 0"),
        ({**FAST, "adaptive_max_loss_increase": -1}, "adaptive_max_loss_increase must be at least 0"),
        ({**FAST, "adaptive_concurrency": 33}, "no 33 requests are computed together, 32 at most"),
        ({**FAST, "adaptive_siblings": ["a"]}, "nothing says how good they have to be"),
        ({**FAST, "adaptive_skip_layers": ["last:2"]}, "nothing says how good they have to be"),
        ({**FAST, "adaptive_skip_layers": ["last:0"]}, "'last:0' names no layers"),
        ({**FAST, "adaptive_eval_file": "nowhere.jsonl"}, "there is no file nowhere.jsonl"),
        ({**FAST, "infer_backend": "vllm"}, "adaptive chooses among ways of our own engine"),
        ({**FAST, "infer_backend": "transformers"}, "adaptive is a setting of the paged engine"),
        ({**FAST, "attn_impl": "eager"}, "adaptive is a setting of the paged engine"),
        ({**FAST, "tensor_parallel_size": 2}, "adaptive measures a model in one process"),
        ({**FAST, "skip_layers": [3]}, "layers are left out only where that is fast enough"),
        ({**FAST, "adaptive_siblings": ["a"], "adapters": ["b"]}, "an adapter fits no smaller model"),
        ({"skip_layers": [-1]}, "layers are counted from 0"),
        ({"skip_layers": [1], "tensor_parallel_size": 2}, "runs with all its layers"),
        ({"skip_layers": [1], "attn_impl": "sdpa"}, "skip_layers is a setting of the paged engine"),
    ],
)
def test_what_cannot(values, message):
    assert any(message in fault for fault in faults(**values)), faults(**values)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("last:4", 4),
        ("8", (8,)),
        ("10,8,8", (8, 10)),
        ("last:0", None),
        ("last", None),
        ("-1", None),
        ("8,", None),
        ("", None),
    ],
)
def test_how_layers_are_named(text, read):
    assert read_skip(text) == read
