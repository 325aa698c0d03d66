"""What `dspark serve` makes of its options, without starting anything."""

import sys

import pytest

from dspark.cli import main, options
from dspark.serve import run


@pytest.fixture
def started(monkeypatch):
    """Run `dspark serve` with these options; what the engine and the server were given."""
    monkeypatch.delenv("DSPARK_API_KEY", raising=False)
    given = {}
    monkeypatch.setattr(options, "load_engine", lambda **settings: given.update(engine=settings))
    monkeypatch.setattr(run, "run_server", lambda engine, config, socket, on_ready: given.update(serve=config))

    def start(*args):
        monkeypatch.setattr(sys, "argv", ["dspark", "serve", "--port", "0", *args])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        assert not stopped.value.code
        return given

    return start


@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        ([], ()),
        (["--host", "localhost"], ()),
        (["--host", "127.0.0.1", "--allowed-hosts", "a.example, B.example"], ("a.example", "b.example")),
        (["--allowed-hosts", "*"], None),
        (["--api-key", "secret"], None),
        (["--api-key", "secret", "--allowed-hosts", "a.example"], ("a.example",)),
        (["--host", "0.0.0.0"], None),
    ],
)
def test_without_a_key_on_loopback_only_this_machines_names_are_answered(args, allowed, started):
    assert started(*args)["serve"].allowed_hosts == allowed


def test_anyone_who_reaches_a_network_is_warned_about(started, capsys):
    started("--host", "0.0.0.0")
    assert "--api-key" in capsys.readouterr().err
    started()
    assert "warning" not in capsys.readouterr().err


def test_the_prefix_cache_is_on_unless_turned_off(started):
    assert started()["engine"]["prefix_cache"] is True
    assert started("--no-prefix-cache")["engine"]["prefix_cache"] is False
