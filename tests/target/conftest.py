import pytest
import torch


@pytest.fixture
def one_thread():
    """Toy passes are too small for two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DSPARK_CACHE", str(folder))
    return folder
