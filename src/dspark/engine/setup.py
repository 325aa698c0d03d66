"""What an engine needs before its first step: device, cache size, proposer, checks of a request."""

import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch

from dspark.artifacts import cache_dir
from dspark.artifacts.calibration import read_calibration
from dspark.config import EngineConfig, SamplingParams
from dspark.config.settings import MODEL_PROPOSER
from dspark.engine.auto_proposer import AutoProposer
from dspark.engine.lookup import LookupProposer
from dspark.engine.model_proposer import ModelProposer
from dspark.engine.proposer import NoneProposer, Proposer
from dspark.engine.tables import find_table
from dspark.errors import DrafterError, RequestError, SettingsError
from dspark.schedule.calibration import Calibration
from dspark.target import Target, load_target
from dspark.target.linear import resolve_dtype

logger = logging.getLogger("dspark")


def pick_device(name: str) -> torch.device:
    """Raises SettingsError when CUDA is asked for and not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device is 'cuda' and this torch sees no GPU; use --device cpu.")
    return torch.device(name)


def context_limit(config: EngineConfig, model_context: int) -> int:
    """Tokens a request may have, prompt included. Raises SettingsError when it exceeds what the model can."""
    if config.context is not None and config.context > model_context:
        raise SettingsError(f"context is {config.context}; this model allows up to {model_context}.")
    return config.context or model_context


def pool_slots(config: EngineConfig, token_bytes: int, context: int) -> int:
    """Token slots that fit `kv_gb`, and no more than a full batch at full length can use."""
    return int(min(config.kv_gb * 1e9 / token_bytes, config.max_batch * (context + 256)))


def check_request(prompt_ids: Sequence[int], params: SamplingParams, vocab_size: int, context: int) -> None:
    """Raises RequestError when a request cannot be run by this model."""
    if not prompt_ids:
        raise RequestError("The prompt is empty; give at least one token.")
    if len(prompt_ids) >= context:
        raise RequestError(
            f"The prompt has {len(prompt_ids)} tokens and the context holds {context}, the answer included; "
            "shorten the prompt."
        )
    named = {
        "the prompt": prompt_ids,
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
    }
    for where, ids in named.items():
        if outside := [i for i in ids if not 0 <= i < vocab_size]:
            raise RequestError(f"Token id {outside[0]} in {where} is outside the vocabulary (0 to {vocab_size - 1}).")


def build_proposer(config: EngineConfig, target: Target) -> Proposer:
    """The proposer a configuration asks for.

    Raises:
        DrafterError: the drafter asked for is missing, damaged or made for another tokenizer.
        DataError: the same of the corpus table asked for.
    """
    if config.proposer == "none":
        return NoneProposer()
    if config.proposer == "lookup":
        return LookupProposer(find_table(config, target))
    if config.proposer.startswith(MODEL_PROPOSER):
        name = config.proposer.removeprefix(MODEL_PROPOSER)
        return ModelProposer(load_target(name, target.decoder.device, config.dtype), target)
    folder = None if config.drafter == "none" else _find_drafter(config.drafter, target)
    if folder is None and config.proposer == "dspark":
        raise DrafterError(
            f"There is no drafter for {target.name}; give one with --drafter FOLDER, or use --proposer lookup."
        )
    if folder is None:
        if config.drafter == "auto":
            logger.info("%s", _no_drafter(target, config.model))
        return LookupProposer(find_table(config, target))
    neural = _dspark(folder, config, target)
    return neural if config.proposer == "dspark" else AutoProposer(LookupProposer(find_table(config, target)), neural)


def _no_drafter(target: Target, model: str) -> str:
    """That there is none, and how to get one for this very model."""
    fact = f"No drafter for {target.name}: n-gram lookup is on."
    if target.tokenizer.chat_template is None:  # the commands below ask through it
        return f"{fact} dspark train makes one from text that the model wrote, packed as docs/training.md says."
    name = shlex.quote(model)
    return (
        f"{fact} Train one, then name it with --drafter (dspark estimate -m {name} --data data.npz says how long):\n"
        f"dspark data synth -m {name} --count 2000 --out prompts.jsonl && "
        f"dspark data respond -m {name} --prompts prompts.jsonl --out data.npz && "
        f"dspark train -m {name} --data data.npz --out drafter"
    )


def _dspark(folder: Path, config: EngineConfig, target: Target) -> Proposer:
    # Imported late: most runs without a drafter never need this code.
    from dspark.drafter import load_drafter
    from dspark.engine.dspark_proposer import DsparkProposer

    device = target.decoder.device
    pad = target.tokenizer.special_id("pad_token")
    drafter = load_drafter(folder, target.decoder, target.fingerprint, resolve_dtype(config.dtype, device), pad)
    for warning in drafter.warnings:
        logger.warning(warning)
    try:
        stored = read_calibration(folder, target.fingerprint)
    except DrafterError as error:  # plans are poorer without, text is the same
        logger.warning("%s", error)
        stored = None
    return DsparkProposer(drafter, Calibration.from_table(stored.table, stored.survivals) if stored else None)


def _find_drafter(name: str, target: Target) -> Path | None:
    """The folder a drafter setting names; for "auto" the shipped or cached one made for this very target."""
    if name != "auto":
        path = Path(os.path.expanduser(name))
        if not os.path.isfile(path / "config.json"):
            raise DrafterError(
                f"Drafter {name!r} is not a folder with a config.json; give a drafter folder, auto or none."
            )
        return path
    from dspark.drafter import DrafterConfig

    shelves = (Path(__file__).parent.parent / "drafters", cache_dir() / "drafters")
    for folder in sorted(path.parent for shelf in shelves for path in shelf.glob("*/config.json")):
        try:
            made_for = DrafterConfig.load(folder).target
        except DrafterError as error:  # nobody asked for this one
            logger.warning("Passing over a drafter: %s", error)
            continue
        if made_for is not None and made_for.matches(target.fingerprint):
            return folder
    return None
