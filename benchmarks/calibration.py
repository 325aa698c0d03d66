"""What calibration reaches on synthetic drafters whose faults are known: `python benchmarks/calibration.py`.

Prints the table of docs/calibration.md: the ECE of the survival at the worst of eight slots, on blocks that were not
fitted, mean of five seeds; the last column is what the true probabilities themselves show.
"""

import torch

from dspark.cli.markdown import markdown_table
from dspark.schedule.calibration import SlotScaling, fit_platt, fit_sts, worst_ece

SLOTS, SEEDS = 8, range(5)
FAULTS = {  # logits are multiplied by the first after the second was added
    "none": (1.0, 0.0),
    "logits twice too large": (2.0, 0.0),
    "every logit 0.8 too high": (1.0, 0.8),
    "logits 0.7 too high, and 1.7 times too large": (1.7, 0.7),
}


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for count in (2500, 5000, 10_000):
        for name, (factor, offset) in FAULTS.items():
            errors = torch.tensor([worst_slots(count, factor, offset, seed) for seed in SEEDS]).mean(0)
            rows.append([f"{count:,}", name, *(f"{100 * error:.1f}" for error in errors.tolist())])
    headers = ["blocks in each half", "fault", "raw", "sts", "platt", "true probabilities"]
    print(markdown_table(headers, rows))


def worst_slots(count: int, factor: float, offset: float, seed: int) -> list[float]:
    """Worst ECE raw, after each fit, and of the truth, on the half not fitted."""
    make = torch.Generator().manual_seed(seed)
    easy = torch.randn(2 * count, 1, generator=make, dtype=torch.float64)  # places in a text differ
    logits = 0.3 + 1.3 * easy + 1.3 * torch.randn(2 * count, SLOTS, generator=make, dtype=torch.float64)
    true = torch.sigmoid(logits)
    kept = (torch.rand(true.shape, generator=make, dtype=torch.float64) < true).cumprod(1).bool()
    stated = torch.sigmoid((logits + offset) * factor)
    fits = (SlotScaling(), fit_sts(stated[:count], kept[:count]), fit_platt(stated[:count], kept[:count]))
    errors = [worst_ece(fit, stated[count:], kept[count:]) for fit in fits]
    return [*errors, worst_ece(SlotScaling(), true[count:], kept[count:])]


if __name__ == "__main__":
    main()
