"""The page Prometheus reads: its format, and that gauges and counters say what happened."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.serve.support import CHAT, LETTERS, chat_request, serving

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def families(running):
    response = running.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def total(family, sample, **labels):
    return sum(s.value for s in family.samples if s.name == sample and labels.items() <= s.labels.items())


def test_the_page_says_what_happened(make_engine):
    with serving(make_engine()) as running:
        body = running.chat(logit_bias=LETTERS).json()
        running.chat(unknown=1)
        running.client.get("/no/such/page")
        running.wait_until_idle()
        found = families(running)
        made, prompt = body["usage"]["completion_tokens"], body["usage"]["prompt_tokens"]
        assert total(found["dspark_http_responses"], "dspark_http_responses_total", route=CHAT, status="200") == 1
        assert total(found["dspark_http_responses"], "dspark_http_responses_total", route=CHAT, status="400") == 1
        assert total(found["dspark_http_responses"], "dspark_http_responses_total", route="other") == 1
        assert total(found["dspark_requests"], "dspark_requests_total", outcome="length") == 1
        assert total(found["dspark_prompt_tokens"], "dspark_prompt_tokens_total") == prompt
        assert total(found["dspark_generated_tokens"], "dspark_generated_tokens_total") == made
        for name, count in (("time_to_first_token", 1), ("inter_token", made - 1), ("answer", 1)):
            assert total(found[f"dspark_{name}_seconds"], f"dspark_{name}_seconds_count") == count
        verify = found["dspark_verify_length"]
        assert total(verify, "dspark_verify_length_sum") == body["dspark"]["verified"]
        assert total(verify, "dspark_verify_length_count") == body["dspark"]["steps"]
        slots = found["dspark_slot_accepted"]
        assert total(slots, "dspark_slot_accepted_total") == body["dspark"]["accepted"]
        parts = found["dspark_step_part_seconds"]
        assert {s.labels["part"] for s in parts.samples if s.labels} == {"draft", "verify", "host"}
        assert total(parts, "dspark_step_part_seconds_total") > 0
        assert total(found["dspark_speculating"], "dspark_speculating") == 1


def test_every_metric_is_documented(running):
    with open(PAGE, encoding="utf-8") as page:
        documented = set(re.findall(r"`([a-z_]+?)(?:_total)?(?:\{[a-z, ]+\})?`", page.read()))
    names = {name.removeprefix("dspark_") for name in families(running) if not name.endswith("_created")}
    missing = names - documented
    assert missing == set()


def test_streams_and_refusals_do_not_disturb_the_gauges(running):
    running.events(CHAT, **chat_request())
    running.chat(temperature=-1)
    running.wait_until_idle()
    found = families(running)
    for name in ("requests_running", "requests_waiting", "kv_slots_used"):
        assert total(found[f"dspark_{name}"], f"dspark_{name}") == 0
    assert total(found["dspark_kv_slots"], "dspark_kv_slots") > 0
