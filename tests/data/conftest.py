import pytest


@pytest.fixture(scope="session")
def writer_folder(tmp_path_factory):
    from tests.data.support import write_writer

    return write_writer(tmp_path_factory.mktemp("writer"))


@pytest.fixture(scope="session")
def writer(writer_folder):
    from tests.data.support import load_writer

    return load_writer(writer_folder)
