"""An OpenAI-compatible server, played by httpx's own mock transport."""

import json

import pytest

httpx = pytest.importorskip("httpx")

from dspark.data import Endpoint  # noqa: E402
from dspark.data.endpoint import ask_all  # noqa: E402
from dspark.errors import DataError  # noqa: E402
from tests.sentences import assert_one_sentence  # noqa: E402

URL = "http://server/v1"


def answer(text="yes", finish="stop"):
    return httpx.Response(200, json={"choices": [{"message": {"content": text}, "finish_reason": finish}]})


def ask(handler, count=1, **changes):
    pauses = []
    endpoint = Endpoint(URL, "m", transport=httpx.MockTransport(handler), pause=pauses.append, **changes)
    requests = ((i, {"messages": [{"role": "user", "content": str(i)}]}) for i in range(count))
    return dict(ask_all(endpoint, requests)), pauses


def test_every_request_is_asked_once_and_answered():
    seen = []

    def handler(request):
        body = json.loads(request.content)
        seen.append(body["messages"][0]["content"])
        assert str(request.url) == f"{URL}/chat/completions" and body["model"] == "m"
        assert request.headers["authorization"] == "Bearer secret"
        return answer(seen[-1] * 2, "length" if seen[-1] == "3" else "stop")

    replies, _ = ask(handler, 20, api_key="secret", parallel=4)
    assert {i: r.text for i, r in replies.items()} == {i: str(i) * 2 for i in range(20)}
    assert sorted(seen, key=int) == [str(i) for i in range(20)]
    assert [i for i, r in replies.items() if not r.ended] == [3]


def test_a_busy_server_is_asked_again():
    turns = iter([httpx.Response(503), httpx.ReadTimeout("slow"), answer()])

    def handler(request):
        turn = next(turns)
        if isinstance(turn, Exception):
            raise turn
        return turn

    replies, pauses = ask(handler)
    assert replies[0].text == "yes" and pauses == [2, 4]


@pytest.mark.parametrize(
    ("response", "names", "pauses"),
    [
        (
            httpx.Response(401, json={"error": {"message": "Bad key.\nGo away."}}),
            ["401", "Bad key", "--api-key-env"],
            0,
        ),
        (httpx.Response(404, text="no such page"), ["404", "no such page", "--endpoint"], 0),
        (httpx.Response(422), ["422", "no reason"], 0),
        (httpx.Response(429, json={"error": "slow down"}), ["429", "slow down", "same command"], 4),
        (httpx.ConnectError("Connection refused"), ["Connection refused", "start the server"], 0),
        (httpx.Response(200, text="<html>"), ["OpenAI-compatible", "/v1"], 0),
        (httpx.Response(200, json={"choices": []}), ["OpenAI-compatible"], 0),
    ],
)
def test_what_a_server_does_wrong_is_one_sentence(response, names, pauses):
    waited = []

    def handler(request):
        if isinstance(response, Exception):
            raise response
        return response

    endpoint = Endpoint(URL, "m", transport=httpx.MockTransport(handler), pause=waited.append)
    with pytest.raises(DataError) as error:
        list(ask_all(endpoint, iter([(0, {})])))
    assert_one_sentence(error.value, [URL, *names])
    assert len(waited) == pauses
