"""Whatever the OpenAPI document allows, and much that it does not, is answered without a 5xx."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode

from inference.drafters.nothing import NothingDrafter
from inference.server.options import KeyRing, ServerOptions
from tests.inference.full import num_cases
from tests.inference.http import MODEL, Running, serving
from tests.inference.tiny import tiny_llama

KEY = "k" * 20
CASES_PER_ROUTE = num_cases(25, 250)
"""Of each kind, valid and not; 250 make more than 2,000 cases in all."""


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    options = ServerOptions(
        model_name=MODEL, default_max_tokens=2, admin_keys=KeyRing([KEY]), client_seconds=5.0
    )
    with serving(tiny_llama(1), drafters=[NothingDrafter()], options=options) as run:
        yield run


def cases_of(running: Running) -> Any:
    _, document = running.send("GET", "/openapi.json", headers=[])
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=f"http://127.0.0.1:{running.port}")
    return schema


def test_no_case_of_the_document_is_a_5xx(running: Running) -> None:
    schema = cases_of(running)
    num_sent = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in GenerationMode:

            @settings(
                max_examples=CASES_PER_ROUTE,
                database=None,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def answers(case: Any) -> None:
                nonlocal num_sent
                num_sent += 1
                if "max_tokens" in (case.body if isinstance(case.body, dict) else {}):
                    case.body["max_tokens"] = 2
                headers = {"authorization": f"Bearer {KEY}"}
                response = case.call(headers=headers)
                drained = response.status_code == 503 and "drained" in response.text
                assert response.status_code < 500 or drained, response.text
                running.scheduler.drain(is_draining=False)

            # A route without parameters has nothing that could be wrong.
            with contextlib.suppress(Unsatisfiable):
                answers()
    assert num_sent > (2000 if CASES_PER_ROUTE > 25 else 100)
    running.wait_until_idle()


@given(
    st.dictionaries(
        st.sampled_from(["prompt", "stop", "n", "seed", "max_tokens", "logprobs", "stream", "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2)
            ),
            max_leaves=5,
        ),
    )
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_invalid_values_of_any_kind_are_refused_by_name(
    running: Running, fields: dict[str, Any]
) -> None:
    body = {"model": MODEL, "prompt": "ab", "max_tokens": 2, **fields}
    if isinstance(body["max_tokens"], int) and body["max_tokens"] > 2:
        body["max_tokens"] = 2
    head = [("content-type", "application/json"), ("authorization", f"Bearer {KEY}")]
    status, answer = running.send("POST", "/v1/completions", json.dumps(body).encode(), head)
    assert status in (200, 400)
    if status == 400:
        assert answer["error"]["message"]
