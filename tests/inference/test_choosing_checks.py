"""Settings that aren't possible are refused by name."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swift.core.errors import UsageError
from swift.inference.backends.base import ModelInfo
from swift.inference.choosing.checks import check_params
from swift.inference.requests import SamplingParams, Structure

ALL = frozenset({"logprobs", "prompt_logprobs", "structure", "beams", "penalties", "logit_bias", "min_p"})
INFO = ModelInfo(context_length=100, vocab_size=50, stop_token_ids=(2,), features=ALL, max_logprobs=5)
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (NAN, INF, -INF, -0.1, "1", True, None)],
        *[("top_p", value) for value in (NAN, INF, 0, -0.1, 1.0001)],
        *[("min_p", value) for value in (NAN, INF, -0.1, 1.1)],
        *[("repetition_penalty", value) for value in (NAN, INF, 0, -1, 1e-30, 1e30)],
        *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (NAN, INF, -2.1, 2.1)],
        *[("length_penalty", value) for value in (NAN, INF, 1e9)],
        *[("max_new_tokens", value) for value in (0, -1, 1.5, NAN)],
        *[("min_new_tokens", value) for value in (-1, 1.5, None)],
        *[("top_k", value) for value in (-1, 1.5, NAN)],
        *[(name, value) for name in ("logprobs", "prompt_logprobs") for value in (-1, 6, 1.5, True)],
        *[("num_beams", value) for value in (0, -1, 65, 1.5)],
        *[("logit_bias", value) for value in (((50, 1.0),), ((-1, 1.0),), ((3, NAN),), ((3, INF),), ((3, 101),))],
        *[("stop_token_ids", value) for value in ((50,), (-1,), (True,), (1.0,))],
        ("stop", ("",)),
        ("stop", ("a", "")),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(UsageError, match=name) as refused:
        check_params(replace(SamplingParams(), **{name: value}), INFO)
    assert refused.value.where == name
    assert refused.value.fix


def test_the_message_names_the_value():
    with pytest.raises(UsageError, match=r"^temperature nan is not possible"):
        check_params(SamplingParams(temperature=NAN), INFO)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1e30, top_p=1e-9, top_k=10**9, min_p=1.0),
        SamplingParams(temperature=2, top_p=1, min_p=0, max_new_tokens=1, min_new_tokens=1),
        SamplingParams(logit_bias=((0, -100), (49, 100.0)), stop_token_ids=(0, 49), stop=("\n",)),
        SamplingParams(repetition_penalty=1.2, presence_penalty=-2, frequency_penalty=2, logprobs=5, prompt_logprobs=0),
        SamplingParams(num_beams=4, length_penalty=-1.0, repetition_penalty=1.5, min_new_tokens=3),
        SamplingParams(structure=Structure("json")),
    ],
)
def test_possible_settings_pass(params):
    check_params(params, INFO)


@pytest.mark.parametrize(
    ("params", "feature", "name"),
    [
        (SamplingParams(logprobs=0), "logprobs", "logprobs"),
        (SamplingParams(prompt_logprobs=0), "prompt_logprobs", "prompt_logprobs"),
        (SamplingParams(structure=Structure("json")), "structure", "structure"),
        (SamplingParams(num_beams=2), "beams", "num_beams"),
        (SamplingParams(repetition_penalty=1.1), "penalties", "repetition_penalty"),
        (SamplingParams(presence_penalty=1), "penalties", "presence_penalty"),
        (SamplingParams(frequency_penalty=1), "penalties", "frequency_penalty"),
        (SamplingParams(logit_bias=((3, 1.0),)), "logit_bias", "logit_bias"),
        (SamplingParams(min_p=0.1), "min_p", "min_p"),
    ],
)
def test_what_the_backend_lacks_is_refused_by_name(params, feature, name):
    check_params(params, INFO)
    with pytest.raises(UsageError, match=name) as refused:
        check_params(params, replace(INFO, features=ALL - {feature}))
    assert refused.value.where == name


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(min_new_tokens=5, max_new_tokens=4),
        SamplingParams(num_beams=2, temperature=0.5),
        SamplingParams(num_beams=2, structure=Structure("json")),
        SamplingParams(num_beams=2, logprobs=1),
        SamplingParams(num_beams=2, stop=("x",)),
    ],
)
def test_contradictions_are_refused(params):
    with pytest.raises(UsageError):
        check_params(params, INFO)
