"""Which ways to run a model are tried, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, LlamaConfig

from swift.core.errors import UsageError
from swift.inference.adaptive.candidates import Wanted, candidates, declared_exits


def wanted(**changes: Any) -> Wanted:
    settings: dict[str, Any] = {"device": "cpu", "bf16": True, "fewer_bits": True, "dtype": "float32"}
    return Wanted(**{**settings, "dtype_given": False, "num_layers": 8, **changes})


def names(**changes: Any) -> list[str]:
    return [way.name for way in candidates(wanted(**changes))]


def exact(**changes: Any) -> list[str]:
    return [way.name for way in candidates(wanted(**changes)) if way.exact]


def test_precisions_of_a_cpu() -> None:
    assert names() == [
        "float32",
        "float32, bfloat16 KV",
        "float32, bfloat16 weights",
        "float32, bfloat16 weights, bfloat16 KV",
        "float32, int8 weights",
        "float32, int8 weights, bfloat16 KV",
        "bfloat16",
    ]
    assert exact() == ["float32"]
    assert names(bf16=False, fewer_bits=False) == ["float32", "float32, bfloat16 KV"]
    assert names(fewer_bits=False) == ["float32", "float32, bfloat16 KV", "bfloat16"]
    assert names(bf16=False) == names()[:-1]


def test_precisions_of_an_accelerator() -> None:
    """What runs without --adaptive is exact, and so is what is more precise."""
    assert names(device="cuda", dtype="bfloat16") == ["float32", "float32, bfloat16 KV", "bfloat16"]
    assert exact(device="cuda", dtype="bfloat16") == ["float32", "bfloat16"]


def test_what_was_asked_for_is_not_varied() -> None:
    assert names(dtype_given=True)[-1] == "float32, int8 weights, bfloat16 KV"
    assert names(dtype="bfloat16", dtype_given=True) == ["bfloat16"]
    assert names(device="cuda", dtype="float16", dtype_given=True) == ["float16"]
    assert {way.kv_cache_dtype for way in candidates(wanted(kv_cache_dtype="float16"))} == {"float16"}
    given = candidates(wanted(weight_format="bfloat16"))
    assert {way.weight_format for way in given} == {"bfloat16"}
    assert [way.name for way in given if way.exact] == ["float32, bfloat16 weights"]


def test_fewer_layers_and_smaller_models_come_last() -> None:
    found = candidates(
        wanted(
            bf16=False,
            fewer_bits=False,
            exits=(6, 4),
            skips=("last:2", "3,1", "last:1"),
            siblings=(Path("/m/half"), Path("/m/tiny")),
        )
    )
    assert [(way.name, way.skip_layers, way.model) for way in found[2:]] == [
        ("without layer 7, float32", (7,), None),
        ("exit after 6, float32", (6, 7), None),  # last:2 is the same
        ("without layers 1, 3, float32", (1, 3), None),
        ("exit after 4, float32", (4, 5, 6, 7), None),
        ("sibling half, float32", (), "/m/half"),
        ("sibling tiny, float32", (), "/m/tiny"),
    ]
    assert not any(way.exact for way in found[1:])
    assert len({way.name for way in found}) == len(found)


@pytest.mark.parametrize("text", ["last:8", "8", "0,1,2,3,4,5,6,7"])
def test_layers_that_are_not_there(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        candidates(wanted(skips=(text,)))
    assert caught.value.where == f"--adaptive_skip_layers {text}"
    assert "8" in caught.value.message


def test_exits_that_a_model_was_trained_for() -> None:
    plain, generation = LlamaConfig(num_hidden_layers=8), GenerationConfig()
    assert declared_exits(plain, generation) == ()
    trained = LlamaConfig(num_hidden_layers=8, early_exit_layers=[2, 6, 8])
    assert declared_exits(trained, generation) == (6, 2)
    assert declared_exits(plain, GenerationConfig(assistant_early_exit=4)) == (4,)
