"""A request's own policy: its drafts follow it and its text does not change."""

import pytest

from tests.serve.support import CHAT, chat_request

SEEDED = {"temperature": 0.8, "seed": 5, "max_tokens": 40}


@pytest.mark.parametrize(("policy", "longest"), [("fixed:1", 1), ("fixed:3", 3), ("fixed:16", 16), ("length", 4)])
@pytest.mark.parametrize("sampling", [{"max_tokens": 40}, SEEDED])
def test_drafts_are_as_long_as_the_request_says(policy, longest, sampling, running):
    running.wait_until_idle()
    before = [running.metric("slot_verified_total", slot=str(slot)) for slot in range(1, 17)]
    own = running.chat(**sampling, policy=policy, proposer=None).json()
    running.wait_until_idle()
    after = [running.metric("slot_verified_total", slot=str(slot)) for slot in range(1, 17)]
    slots = [slot for slot, counts in enumerate(zip(before, after, strict=True), 1) if counts[0] != counts[1]]
    plain = running.chat(**sampling, proposer="none").json()
    assert own["choices"] == plain["choices"]
    assert slots == list(range(1, min(longest, running.engine.proposer.most) + 1))


def test_the_servers_own_policy_may_be_named(running):
    served = running.engine.config.policy
    named, default = (running.post(CHAT, **chat_request(policy=policy)).json() for policy in (served, None))
    assert named["choices"] == default["choices"] and named["dspark"]["drafted"] == default["dspark"]["drafted"]


def test_a_policy_does_not_outlive_its_request(running):
    before = running.chat(max_tokens=40).json()["dspark"]["drafted"]
    running.chat(max_tokens=40, policy="fixed:1", n=3)
    running.wait_until_idle()
    assert running.chat(max_tokens=40).json()["dspark"]["drafted"] == before
    assert running.client.get("/v1/dspark/state").json()["policy"] == running.engine.config.policy
