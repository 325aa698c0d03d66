import pytest

from tests.engine import support as s
from tests.serve.support import serving


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """Exact-mode toy whose next token depends mostly, but not only, on the last one."""
    return s.toy_target(tmp_path_factory.mktemp("toy"), layer_scale=0.06)


@pytest.fixture(scope="session")
def make_engine(target):
    """A new engine that drafts well and badly at every slot."""

    def make(proposer=None, **settings):
        return s.toy_engine(target, proposer or s.bigram_proposer(target), **{"policy": "fixed:5", **settings})

    return make


@pytest.fixture(scope="session")
def running(make_engine):
    """One server for all tests that do not change it."""
    with serving(make_engine()) as server:
        yield server


@pytest.fixture
def plain(target):
    """What plain decoding says, in the library."""
    return s.toy_engine(target)
