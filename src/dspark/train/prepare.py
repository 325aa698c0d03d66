"""Put a run together: from a target, data and settings to a trainer before its first step."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.data import Corpus
from dspark.drafter import DrafterConfig, check_identity, check_tensors, read_tensors
from dspark.errors import TrainError
from dspark.target import Target
from dspark.target.layers import rms_norm
from dspark.train.copying import copying_tensors, has_room, read_evidence
from dspark.train.distance import distance_heads
from dspark.train.features import CacheLimits, FeatureStore, feature_bytes
from dspark.train.processes import Processes
from dspark.train.settings import TrainSettings
from dspark.train.start import choose_mask_id, drafter_config, first_tensors, special_ids
from dspark.train.trainer import Trainer
from dspark.train.warm import measured_taps, tap_sizes, warm_tensors

logger = logging.getLogger("dspark")
_COPIED = ("embed_tokens.weight", "lm_head.weight")  # the target's own, which some folders bring along


def new_trainer(
    target: Target,
    corpus: Corpus,
    settings: TrainSettings,
    cache: CacheLimits | None = None,
    init_from: Path | None = None,
    mask_token_id: int | None = None,
    processes: Processes | None = None,
) -> Trainer:
    """A trainer at step 0.

    Args:
        cache: what the target's features may take; default 4 GB of memory and no disk.
        init_from: a drafter folder to go on from, instead of fresh weights; its sizes must be those `settings` ask for
            (`sizes_of` reads them).
        mask_token_id: None picks the smallest id that neither the data nor the tokenizer's roles use.

    Raises:
        DrafterError: a setting does not fit the target, or `init_from` is damaged or made for another tokenizer.
        TrainError: `init_from` has other sizes, a mask token cannot be used, there is nothing to learn from, or the
            folder of `cache` cannot be written.
    """
    if not len(corpus):
        raise TrainError("No sequence is left to train on; give more data or hold out less.")
    config, tensors = _weights(target, corpus, settings, init_from, mask_token_id)
    cache, taps = cache or CacheLimits(), config.target_layer_ids
    disk = cache.open_disk(target, taps, processes.count if processes else 1)
    store = FeatureStore(target.decoder, taps, corpus, cache.memory_bytes, disk)
    sizes = tap_sizes(measured_taps(target, corpus, taps))
    fresh = init_from is None and not settings.warm_start
    if fresh and settings.copy_heads and settings.distance_heads and has_room(config):
        tensors |= _copying(target, corpus, config, tensors, store, sizes, settings.seed)
    left_over = cache.memory_bytes - feature_bytes(target.decoder, taps, corpus) if cache.probs else 0.0
    return Trainer(target, corpus, config, tensors, settings, store, processes, left_over, sizes)


def _copying(
    target: Target,
    corpus: Corpus,
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    store: FeatureStore,
    sizes: Tensor,
    seed: int,
) -> dict[str, Tensor]:
    """Weights of heads that copy, for taps as they are; none where the data has nothing to measure them on."""
    decoder, evidence = target.decoder, read_evidence(store, corpus, sizes)
    if evidence is None:
        return {}
    embedding = decoder.embed(torch.arange(config.vocab_size, device=decoder.device)).float().cpu()
    found = copying_tensors(config, tensors, evidence, embedding, decoder.final_norm.float().cpu(), seed)
    return found | {"fc.weight": found["fc.weight"] / sizes} if found else {}


def sizes_of(folder: Path) -> dict[str, Any]:
    """The settings a run needs to go on from the drafter in `folder`. Raises DrafterError when there is none."""
    config = DrafterConfig.load(folder)
    return {
        "taps": config.target_layer_ids,
        "layers": config.num_layers,
        "kv_heads": config.num_kv_heads,
        "head": config.head,
        "rank": config.markov_rank,
        "block_size": config.block_size,
        "draft_vocab": config.draft_vocab_size,
    }


def _weights(
    target: Target, corpus: Corpus, settings: TrainSettings, init_from: Path | None, mask_token_id: int | None
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Configuration and first weights."""
    used = set(torch.unique(corpus.ids).tolist())
    if init_from is not None and settings.warm_start:
        raise TrainError("A warm start and a drafter to go on from both choose first weights; leave one of them out.")
    if init_from is not None:
        config, tensors = _continued(target, settings, init_from, mask_token_id)
        if config.mask_token_id in used:
            raise TrainError(
                f"The data holds token {config.mask_token_id}, which stands for masks in the drafter in {init_from}; "
                "leave such texts out, or train a new drafter."
            )
        return config, tensors
    special = special_ids(target)
    if mask_token_id is None:
        mask_token_id = choose_mask_id(used, special, target.spec.vocab_size)
    elif mask_token_id in used | special:
        what = "occurs in the data" if mask_token_id in used else "is the target's end, padding, begin or unknown token"
        raise TrainError(f"Mask token {mask_token_id} {what}; give an id the target never uses, or leave it out.")
    config = drafter_config(target, settings, mask_token_id)
    tensors = first_tensors(config, corpus, settings, target.spec.eos_ids, target.decoder.final_norm.cpu())
    if settings.warm_start:
        return config, tensors | warm_tensors(config, target, corpus)
    taps = measured_taps(target, corpus, config.target_layer_ids)
    tensors["fc.weight"] /= tap_sizes(taps)
    if settings.distance_heads:
        context = rms_norm(taps @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], config.rms_eps)
        ids = torch.cat((corpus.ids[: taps.shape[0]], torch.full((taps.shape[0],), mask_token_id)))
        tensors |= distance_heads(config, tensors, context, target.decoder.embed(ids).float().cpu())
    return config, tensors


def _continued(
    target: Target, settings: TrainSettings, folder: Path, mask_token_id: int | None
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Configuration and weights of an existing drafter, now made for `target`."""
    theirs = DrafterConfig.load(folder)
    theirs.check_fits(target.spec, target.tokenizer.special_id("pad_token"))
    for note in check_identity(theirs, target.fingerprint):
        logger.warning(note)
    if mask_token_id not in (None, theirs.mask_token_id):
        raise TrainError(
            f"The drafter in {folder} has mask token {theirs.mask_token_id}, not {mask_token_id}; leave it out."
        )
    ours = drafter_config(target, settings, theirs.mask_token_id)
    wanted, found = ours.to_dict(), theirs.to_dict()
    # No weight depends on the block size, so a drafter may learn short blocks first, which cost less.
    for name in sorted((wanted.keys() | found.keys()) - {"dspark", "block_size"}):
        if wanted.get(name) != found.get(name):
            raise TrainError(
                f"The drafter in {folder} has {name} {found.get(name)!r} and this run asks for {wanted.get(name)!r}; "
                "give the options it was trained with."
            )
    tensors = read_tensors(folder)
    check_tensors(theirs, tensors)
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    for copied in _COPIED:
        if tensors.pop(copied, None) is not None:
            logger.info("%s brings its own %s; the target's takes its place.", folder, copied)
    config = ours
    if not theirs.token_free_confidence:  # an older or foreign drafter: give it what ours have
        tensors["confidence_head_token_free.proj.weight"] = torch.zeros(1, config.hidden_size)
        tensors["confidence_head_token_free.proj.bias"] = torch.zeros(1)
    check_tensors(config, tensors)
    return config, tensors
