import pytest
import torch

from tests.engine.support import toy_target


@pytest.fixture(autouse=True)
def one_thread():
    """Toy passes are too small for two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """Exact-mode toy whose next token depends mostly, but not only, on the last one."""
    return toy_target(tmp_path_factory.mktemp("toy"), layer_scale=0.06)


@pytest.fixture(scope="session")
def deep_target(tmp_path_factory):
    """Exact-mode toy that reads its whole context, so that any fault of the cache shows."""
    return toy_target(tmp_path_factory.mktemp("deep"))
