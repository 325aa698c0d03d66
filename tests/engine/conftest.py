import pytest

from tests.engine.support import toy_target


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """Exact-mode toy whose next token depends mostly, but not only, on the last one."""
    return toy_target(tmp_path_factory.mktemp("toy"), layer_scale=0.06)


@pytest.fixture(scope="session")
def deep_target(tmp_path_factory):
    """Exact-mode toy that reads its whole context, so that any fault of the cache shows."""
    return toy_target(tmp_path_factory.mktemp("deep"))
