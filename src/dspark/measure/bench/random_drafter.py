"""A drafter that knows nothing, of the size a trained one has: what hopeless drafts cost."""

from pathlib import Path

from dspark.drafter import random_tensors
from dspark.drafter.checkpoint import save_drafter
from dspark.target import Target
from dspark.train.settings import TrainSettings
from dspark.train.start import choose_mask_id, default_taps, drafter_config, special_ids


def write_random_drafter(target: Target, folder: Path, seed: int = 0) -> Path:
    """Write a drafter of the default sizes with random weights for this target; its folder.

    Raises:
        DrafterError: the target has no room for one.
    """
    spec = target.spec
    special = special_ids(target)
    settings = TrainSettings(steps=1, taps=default_taps(spec.num_layers))
    mask = choose_mask_id((), special, spec.vocab_size)
    config = drafter_config(target, settings, mask)
    save_drafter(folder, config, random_tensors(config, seed))
    return folder
