import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Toy passes are too small for two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def writer_folder(tmp_path_factory):
    from tests.data.support import write_writer

    return write_writer(tmp_path_factory.mktemp("writer"))


@pytest.fixture(scope="session")
def writer(writer_folder):
    from tests.data.support import load_writer

    return load_writer(writer_folder)
