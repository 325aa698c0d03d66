"""Drafters whose true acceptance is known, and that state it wrongly in a known way."""

import torch

from dspark.measure.confidence import Blocks


def blocks(count, slots, temperatures=1.0, biases=0.0, seed=0):
    """Blocks of a drafter whose confidence c becomes true under sigmoid(logit(c) / temperature + bias), per slot."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(count, slots, generator=generator, dtype=torch.float64)
    shared = torch.randn(count, 1, generator=generator, dtype=torch.float64)  # easy and hard places in a text
    logits = 0.3 + 1.3 * own + 1.3 * shared
    kept = torch.rand(count, slots, generator=generator, dtype=torch.float64) < torch.sigmoid(logits)
    temperatures, biases = torch.as_tensor(temperatures).double(), torch.as_tensor(biases).double()
    return Blocks(torch.sigmoid((logits - biases) * temperatures), kept.cumprod(1).bool())
