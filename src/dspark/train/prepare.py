"""Put a run together: from a target, data and settings to a trainer before its first step."""

from pathlib import Path

import torch
from torch import Tensor

from dspark.data import Corpus
from dspark.drafter import DrafterConfig, check_tensors, read_tensors
from dspark.errors import TrainError
from dspark.target import Target
from dspark.train.settings import TrainSettings
from dspark.train.start import choose_mask_id, drafter_config, first_tensors, special_ids
from dspark.train.trainer import Trainer


def new_trainer(
    target: Target,
    corpus: Corpus,
    settings: TrainSettings,
    cache_bytes: float = 4e9,
    init_from: Path | None = None,
    mask_token_id: int | None = None,
) -> Trainer:
    """A trainer at step 0.

    Args:
        init_from: a drafter folder to go on from, instead of fresh weights; its sizes must be those `settings` ask for.
        mask_token_id: None picks the smallest id that neither the data nor the tokenizer's roles use.

    Raises:
        DrafterError: a setting does not fit the target, or `init_from` is damaged.
        TrainError: `init_from` has other sizes, a mask token cannot be used, or there is nothing to learn from.
    """
    if not len(corpus):
        raise TrainError("No sequence is left to train on; give more data or hold out less.")
    if init_from is not None:
        config, tensors = _continued(target, settings, init_from, mask_token_id)
        return Trainer(target, corpus, config, tensors, settings, cache_bytes)
    used = set(torch.unique(corpus.ids).tolist())
    special = special_ids(target)
    if mask_token_id is None:
        mask_token_id = choose_mask_id(used, special, target.spec.vocab_size)
    elif mask_token_id in used | special:
        what = "occurs in the data" if mask_token_id in used else "is the target's end, padding, begin or unknown token"
        raise TrainError(f"Mask token {mask_token_id} {what}; give an id the target never uses, or leave it out.")
    config = drafter_config(target, settings, mask_token_id)
    tensors = first_tensors(config, corpus, settings, target.spec.eos_ids)
    return Trainer(target, corpus, config, tensors, settings, cache_bytes)


def _continued(
    target: Target, settings: TrainSettings, folder: Path, mask_token_id: int | None
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Configuration and weights of an existing drafter, now made for `target`."""
    theirs = DrafterConfig.load(folder)
    if mask_token_id not in (None, theirs.mask_token_id):
        raise TrainError(
            f"The drafter in {folder} has mask token {theirs.mask_token_id}, not {mask_token_id}; leave it out."
        )
    ours = drafter_config(target, settings, theirs.mask_token_id)
    wanted, found = ours.to_dict(), theirs.to_dict()
    for name in wanted.keys() | found.keys():
        if name != "dspark" and wanted.get(name) != found.get(name):
            raise TrainError(
                f"The drafter in {folder} has {name} {found.get(name)!r} and this run asks for {wanted.get(name)!r}; "
                "give the options it was trained with."
            )
    tensors = read_tensors(folder)
    check_tensors(theirs, tensors)
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    for copied in ("embed_tokens.weight", "lm_head.weight"):
        tensors.pop(copied, None)  # the target's own
    config = ours
    if not theirs.token_free_confidence:  # an older or foreign drafter: give it what ours have
        size = config.hidden_size
        tensors["confidence_head_token_free.proj.weight"] = next(iter(tensors.values())).new_zeros(1, size)
        tensors["confidence_head_token_free.proj.bias"] = next(iter(tensors.values())).new_zeros(1)
    check_tensors(config, tensors)
    return config, tensors
