import pytest
import torch


@pytest.fixture
def one_thread():
    """Toy passes are too small for two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
