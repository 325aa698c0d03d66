import pytest

from tests.train.toys import CPU, write_target


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(model_folder):
    from dspark.target import load_target

    return load_target(str(model_folder), CPU, "float32")


@pytest.fixture(scope="session")
def corpus(target):
    """Greedy text of the toy, which needs context: the last token alone does not tell the next."""
    from tests.train.toys import greedy_corpus

    return greedy_corpus(target)
