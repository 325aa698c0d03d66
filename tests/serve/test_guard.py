"""Who may ask, and how much: the key, and the size of a request."""

import base64
import json
import socket

import pytest

from dspark.errors import SettingsError
from dspark.serve import ServeConfig
from tests.sentences import assert_one_sentence
from tests.serve.support import CHAT, chat_request, serving

KEY = "sesame-open"
LIMIT = 4000


@pytest.fixture(scope="module")
def guarded(make_engine):
    with serving(make_engine(), api_key=KEY, max_body_bytes=LIMIT, body_timeout_s=0.2) as server:
        yield server


def basic(password):
    return "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()


WRONG_KEYS = [
    "",
    "Bearer",
    f"Bearer {KEY}x",
    f"Bearer {KEY[:-1]}",
    KEY,
    basic("guess"),
    "Basic ???",
    "Bearer s\xe9same",
]


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/metrics", "/", "/openapi.json", "/v1/dspark/state", "/nowhere"])
def test_everything_but_health_needs_the_key(path, guarded):
    method = "POST" if path == CHAT else "GET"
    for given in WRONG_KEYS:
        headers = {"authorization": given.encode("latin-1")}
        response = guarded.client.request(method, path, json=chat_request(), headers=headers)
        assert response.status_code == 401 and response.headers["www-authenticate"]
        assert_one_sentence(response.json()["error"]["message"])
        assert KEY not in response.text


def test_health_needs_no_key(guarded):
    response = guarded.client.get("/health", headers={"authorization": ""})
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_the_key_opens_as_bearer_token_and_as_a_browsers_password(guarded):
    for given in (f"Bearer {KEY}", f"bearer {KEY}", basic(KEY)):
        assert guarded.client.get("/v1/models", headers={"authorization": given}).status_code == 200
    challenge = guarded.client.get("/", headers={"authorization": ""}).headers["www-authenticate"]
    assert challenge.startswith("Basic ")  # a browser asks for the password


@pytest.fixture(scope="module")
def local(make_engine):
    """Without a key, on loopback, as `dspark serve` starts by default; one name is allowed beside."""
    with serving(make_engine(), allowed_hosts=("llm.example.org",)) as server:
        yield server


HERE = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:80", "127.8.9.1", "[::1]", "[::1]:8000"]
ELSEWHERE = [
    "attacker.example",
    "attacker.example:8000",
    "127.0.0.1.attacker.example",
    "localhost.attacker.example",
    "xlocalhost",
    "0.0.0.0:8000",
    "192.168.0.7",
    "127.0.0.1:80:80",
    "[::1",
    "[::1]x",
    "localhost@attacker.example",
    "",
]


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/metrics", "/", "/v1/dspark/state"])
def test_a_page_whose_own_name_resolves_to_this_machine_is_refused(path, local):
    """DNS rebinding: to the browser it is of one origin with the server, but it asks for its own name."""
    for host in ELSEWHERE:
        response = local.client.request(
            "POST" if path == CHAT else "GET", path, json=chat_request(), headers={"host": host}
        )
        assert response.status_code == 403, host
        assert_one_sentence(response.json()["error"]["message"], ["--allowed-hosts"])
        assert response.json()["error"]["code"] == "host_not_allowed"
    assert local.client.get("/health", headers={"host": ELSEWHERE[0]}).status_code == 200


@pytest.mark.parametrize("host", [*HERE, "llm.example.org", "LLM.example.org:443"])
def test_this_machine_and_allowed_names_are_answered(host, local):
    assert local.client.get("/v1/models", headers={"host": host}).status_code == 200


def test_behind_a_key_any_name_is_answered(guarded):
    assert guarded.client.get("/v1/models", headers={"host": "attacker.example"}).status_code == 200


@pytest.mark.parametrize("host", ["", "http://a.example", "a.example:80", "A.example", "a b"])
def test_hosts_that_no_header_has(host):
    with pytest.raises(SettingsError, match="allowed-hosts"):
        ServeConfig(model_name="toy", allowed_hosts=(host,))


@pytest.mark.parametrize("key", ["", " x", "x\n", "schl\xfcssel"])
def test_keys_that_headers_cannot_carry(key):
    with pytest.raises(SettingsError, match="api-key"):
        ServeConfig(model_name="toy", api_key=key)


@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies_are_refused(chunked, guarded):
    body = json.dumps(chat_request("x" * LIMIT)).encode()
    content = iter([body[:1000], body[1000:]]) if chunked else body
    response = guarded.client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert_one_sentence(response.json()["error"]["message"], [str(LIMIT)])
    assert guarded.chat().status_code == 200


def test_chunked_bodies_within_the_limit_are_read(guarded):
    body = json.dumps(chat_request()).encode()
    response = guarded.client.post(
        CHAT, content=iter([body[:10], body[10:]]), headers={"content-type": "application/json"}
    )
    assert response.json()["choices"] == guarded.chat().json()["choices"]


def raw(running, data, wait_for_end=True):
    """What the server says to these bytes on a connection of their own."""
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b"")) if wait_for_end else b""


HEAD = f"POST {CHAT} HTTP/1.1\r\nhost: toy\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"


def test_a_body_that_never_comes_is_given_up(guarded):
    answer = raw(guarded, f"{HEAD}content-length: 100\r\n\r\n{{".encode())
    assert answer.startswith(b"HTTP/1.1 408") and b"0.2 s" in answer


def test_a_client_that_leaves_while_sending_is_forgotten(guarded):
    raw(guarded, f"{HEAD}content-length: 100\r\n\r\n{{".encode(), wait_for_end=False)
    guarded.wait_until_idle()
    assert guarded.chat().status_code == 200


def test_bytes_that_are_not_http(guarded):
    assert raw(guarded, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_no_prompt_or_answer_text_is_logged(guarded, caplog):
    caplog.set_level("DEBUG")
    answer = guarded.chat("a very private question").json()["choices"][0]["message"]["content"]
    guarded.chat("a very private question", temperature=-1)
    guarded.chat("a very private question", unknown="a very private question")
    assert "private" not in caplog.text and answer not in caplog.text
