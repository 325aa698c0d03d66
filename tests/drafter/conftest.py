import pytest
import torch

from dspark.target.decoder import Decoder

from .toys import make_target

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target() -> Decoder:
    """Tied toy target in fp64."""
    return make_target()
