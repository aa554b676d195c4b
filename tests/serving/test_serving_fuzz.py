"""Requests made up from the server's own description: nothing breaks, no answer that the description doesn't have."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
import schemathesis
from live_server import MODEL, Live, wait_for
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
USUAL = 80
EXAMPLES = int(os.environ.get("SWIFT_TEST_FUZZ_EXAMPLES", USUAL))  # of each path; more are drawn anew each time
LENGTHS = {"max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 3, "n": 2, "best_of": 2, "min_tokens": 0}


def shortened(body: Any, path: str) -> Any:
    """A body whose answer is short, to a model that there is: most would be refused before anything is looked at."""
    if not isinstance(body, dict):
        return body
    body = {name: min(value, LENGTHS[name]) if _long(name, value) else value for name, value in body.items()}
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    if path == "/v1/chat/completions":
        body.setdefault("max_tokens", 3)
    if path == "/v1/responses":
        body.setdefault("max_output_tokens", 3)
    return body


def _long(name: str, value: Any) -> bool:
    return name in LENGTHS and isinstance(value, int) and value > LENGTHS[name]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
def test_nothing_that_is_described_breaks_it(live: Live, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    names = []
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue  # there is nothing to be wrong
        names.append(operation.label)

        @hypothesis.settings(
            max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES == USUAL, database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            case.body = shortened(case.body, case.operation.path)
            case.call_and_validate(checks=CHECKS, timeout=60)

        ask()
    assert "POST /v1/chat/completions" in names
    wait_for(live.idle)
    assert live.get("/health").status_code == 200
