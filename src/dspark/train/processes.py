"""Several processes that share the batches of one run, one GPU each, as `accelerate launch` or torchrun start them.

Every process holds all weights and takes its share of a batch's chunks; gradients and sums are added up, so that all
take the same step. Denominators come from the whole batch, which every process knows, so adding is all there is to do.
"""

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark.errors import TrainError


class Processes(Protocol):
    """This process is number `index` of `count`."""

    index: int
    count: int
    device: str | None  # None where this process may choose

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes; every process calls it with the same shapes."""


class Alone:
    """One process: sums are what they are, bit for bit."""

    index, count = 0, 1
    device: str | None = None

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        pass


class Accelerated:
    """Processes of a launch, through Hugging Face accelerate (gloo on CPUs, NCCL on GPUs)."""

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self.index, self.count = int(accelerator.process_index), int(accelerator.num_processes)
        self.device: str | None = str(accelerator.device)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        flat = self._accelerator.reduce(torch.cat([t.flatten() for t in tensors]), reduction="sum")
        for tensor, summed in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(summed.view_as(tensor))


def join_processes(device: str) -> Alone | Accelerated:
    """The processes this one was launched with; alone unless a launcher says otherwise.

    Raises:
        TrainError: there are several, and accelerate is not installed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Alone()
    try:
        from accelerate import Accelerator  # an optional extra
    except ImportError:
        raise TrainError(
            "Several processes were launched, which needs accelerate; install it with "
            "`pip install 'dspark[accelerate]'`."
        ) from None
    return Accelerated(Accelerator(cpu=device == "cpu"))


def shared_total(value: float, processes: Processes, device: torch.device) -> float:
    """The sum of one number over all processes."""
    if processes.count == 1:
        return value
    total = torch.tensor([value], dtype=torch.float64, device=device)
    processes.add_up([total])
    return float(total)
