"""`dspark serve` as a real process: ready, asked by a real client, ended by a signal."""

import os
import re
import signal
import socket
import subprocess
import sys

import openai
import pytest

from dspark.config import SamplingParams
from tests.sentences import assert_one_sentence


@pytest.fixture
def server(model):
    """The process, and the address it prints when it is ready."""
    args = ["serve", "--model", model, "--port", "0", "--proposer", "lookup", "--served-model-name", "toy"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dspark.cli.main", *args, "--kv-gb", "0.02", "--threads", "1"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DSPARK_API_KEY": "secret"},
    )
    for line in process.stderr:
        if ready := re.search(r"Serving toy on (http://127\.0\.0\.1:\d+)", line):
            break
    else:
        pytest.fail("the server ended before it was ready")
    yield process, ready[1]
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_client_is_answered_and_a_signal_ends_the_server(number, server, engine):
    process, url = server
    messages = [{"role": "user", "content": "hello hello"}]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)
    answer = client.chat.completions.create(model="toy", messages=messages, temperature=0, max_tokens=12)
    expected = engine.chat([messages], SamplingParams(temperature=0, max_tokens=12))[0].text
    assert answer.choices[0].message.content == expected
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong").models.list()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in err and "hello" not in err


def refused(run, *args):
    result = run("serve", *args)
    assert result.code == 2
    assert_one_sentence(result.err.strip())
    return result.err


def test_mistakes_are_one_line(run, model, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in refused(run, "--model", model, "--port", port)
    assert "nowhere.invalid" in refused(run, "--model", model, "--host", "nowhere.invalid")
    assert "api-key" in refused(run, "--model", model, "--api-key", "")
    assert "request_timeout_s" in refused(run, "--model", model, "--request-timeout", "0")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "dspark[serve]" in refused(run, "--model", model)
