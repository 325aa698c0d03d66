"""The served OpenAPI, read by schemathesis: whatever it sends, the server answers and never fails."""

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from dspark.serve.schema import ChatRequest, CompletionRequest
from tests.serve.support import CHAT, COMPLETIONS, serving


@pytest.fixture(scope="module")
def api(make_engine):
    """A server with a small context, so that no case takes long."""
    with serving(make_engine(context=128), default_max_tokens=8, max_body_bytes=100_000) as running:
        schema = schemathesis.openapi.from_dict(running.client.get("/openapi.json").json())
        schema.config.update(base_url=running.url)
        yield running, schema


def fuzz(api, cases):
    """Cases spread over the API's operations; the two that decode get most of them."""
    running, schema = api
    operations = [operation.ok() for operation in schema.get_all_operations()]
    paths = {operation.path for operation in operations}
    assert paths >= {CHAT, COMPLETIONS, "/v1/models", "/v1/models/{model}", "/health", "/metrics", "/v1/dspark/state"}
    for operation in operations:
        decodes = operation.path in (CHAT, COMPLETIONS)
        strategy = operation.as_strategy() if not decodes else operation.as_strategy().map(_small)
        _run(strategy, max(2, cases * 45 // 100 if decodes else cases // 50))
    running.wait_until_idle()
    assert running.metric("kv_slots_used") == running.metric("requests_running") == 0
    assert running.chat().status_code == 200
    statuses = {
        sample.labels["status"]
        for metric in running.server.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "dspark_http_responses_total"
    }
    assert {"200", "400"} <= statuses and not {status for status in statuses if status >= "500"}


def _small(case):
    """Name the real model, so that requests get past that field, and let no answer be long."""
    if isinstance(case.body, dict):
        case.body.update(model="toy", max_tokens=4)
        case.body.pop("max_completion_tokens", None)
        if isinstance(case.body.get("n"), int):
            case.body["n"] = min(case.body["n"], 4)
    return case


def _run(strategy, cases):
    @given(strategy)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def run(case):
        case.call_and_validate(checks=[not_a_server_error])

    run()


def test_no_case_is_a_server_error(api):
    fuzz(api, 60)


@pytest.mark.slow
def test_no_case_of_2000_is_a_server_error(api):
    fuzz(api, 2000)


FIELDS = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_of_any_json_are_answered_or_refused(path, api):
    """Beside what the schema allows: every field with any value."""
    running, _ = api
    base = {"model": "toy", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}

    @given(st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=4))
    @settings(max_examples=40, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    def run(fields):
        body = {name: base[name] for name in ("model", "messages" if path == CHAT else "prompt")} | fields
        response = running.client.post(
            path, content=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
        assert response.status_code in (200, 400, 404), response.text

    run()
