"""What a drafter is: sizes, taps, head and the target it was made for, as written in its folder's config.json.

The file is the one vLLM and SGLang load (docs/checkpoints.md); our own settings sit under one key, "dspark". Folders
of DeepSpec (the same keys without ours) and of speculators (other keys) are read too; we never write them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.artifacts import Fingerprint
from dspark.errors import DrafterError
from dspark.target.decoder import EMBEDDING_TAP
from dspark.target.spec import ModelSpec

ARCHITECTURE = "Qwen3DSparkModel"
FORMAT = 1
# Our names of the sequential heads, and what DeepSpec and speculators call them in `markov_head_type`.
HEAD_TYPES = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}
HEADS = ("none", *HEAD_TYPES)
_SIZES = (
    *("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("ffn_size", "vocab_size", "block_size", "context"),
)
_OWN_KEYS = ("format", "head", "token_free_confidence", "target")
# What transformers' Qwen3Config means when a key is absent; speculators leaves such keys out.
_QWEN3_DEFAULTS = {"head_dim": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_QWEN3_THETA = 10000.0


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise DrafterError(f"Drafter setting {name} is {value!r}; allowed is {allowed}.")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_layer_ids(ids: Any, name: str, embedding: int) -> None:
    good = isinstance(ids, list | tuple) and len(ids) > 0 and all(_is_whole(i, embedding) for i in ids)
    good = good and all(a < b for a, b in zip(ids, ids[1:], strict=False))
    _check(good, name, ids, f"an ascending list of layer ids, each once, from {embedding} (the embedding) up")


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """Shape and meaning of one drafter. Sizes in elements, `context` in tokens.

    Raises:
        DrafterError: a value is outside its range.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    rms_eps: float = 1e-6
    rope_theta: float = _QWEN3_THETA
    context: int = 32768
    head: str = "markov"
    markov_rank: int = 256  # 0 with head "none"
    confidence: bool = True
    confidence_with_markov: bool = True
    token_free_confidence: bool = False
    draft_vocab_size: int | None = None  # None: the whole vocabulary
    target: Fingerprint | None = None  # None: a foreign folder, which does not say

    def __post_init__(self) -> None:
        for name in _SIZES:
            _check(_is_whole(getattr(self, name), 1), name, getattr(self, name), "a whole number of 1 or more")
        heads, kv_heads = self.num_heads, self.num_kv_heads
        _check(heads % kv_heads == 0, "num_kv_heads", kv_heads, f"a divisor of num_heads ({heads})")
        _check(self.head_dim % 2 == 0, "head_dim", self.head_dim, "an even number, which rotary positions need")
        for name in ("rms_eps", "rope_theta"):
            value = getattr(self, name)
            _check(isinstance(value, int | float) and value > 0, name, value, "a number above 0")
        _check_layer_ids(self.target_layer_ids, "target_layer_ids", EMBEDDING_TAP)
        mask, vocab = self.mask_token_id, self.vocab_size
        _check(_is_whole(mask, 0) and mask < vocab, "mask_token_id", mask, f"a token id from 0 to {vocab - 1}")
        _check(self.head in HEADS, "head", self.head, f"one of {', '.join(HEADS)}")
        least = 0 if self.head == "none" else 1
        good_rank = _is_whole(self.markov_rank, least) and (self.head != "none" or self.markov_rank == 0)
        _check(good_rank, "markov_rank", self.markov_rank, "0 with head none, and 1 or more with every other head")
        needs_rank = self.confidence and self.confidence_with_markov
        _check(
            not (needs_rank and self.head == "none"),
            "confidence_head_with_markov",
            True,
            "false with head none, which has no token embedding to look at",
        )
        size = self.draft_vocab_size
        _check(
            size is None or (_is_whole(size, 1) and size < vocab),
            "draft_vocab_size",
            size,
            f"1 to {vocab - 1}, or none for the whole vocabulary",
        )

    @property
    def draft_vocab(self) -> int:
        """Number of tokens the drafter can propose."""
        return self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size

    def check_fits(self, spec: ModelSpec, pad_id: int | None = None) -> None:
        """Raise DrafterError unless this drafter can draft for a target of shape `spec`."""
        for name, ours, theirs in (
            ("hidden size", self.hidden_size, spec.hidden_size),
            ("vocabulary size", self.vocab_size, spec.vocab_size),
        ):
            if ours != theirs:
                raise DrafterError(
                    f"The drafter was made for a target of {name} {ours}, this target has {theirs}; "
                    "use a drafter trained for this target."
                )
        last = spec.num_layers - 1
        if self.target_layer_ids[-1] >= last:
            raise DrafterError(
                f"The drafter taps target layer {self.target_layer_ids[-1]}; a target of {spec.num_layers} layers has "
                f"taps {EMBEDDING_TAP} to {last - 1} (the last layer is refused), so use a drafter trained for it."
            )
        if self.mask_token_id in spec.eos_ids or self.mask_token_id == pad_id:
            kind = "padding" if self.mask_token_id == pad_id else "end"
            raise DrafterError(
                f"The drafter's mask token {self.mask_token_id} is the target's {kind} token; "
                "retrain it with an id the target never uses."
            )

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json."""
        values: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.rms_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": False,
            "target_layer_ids": list(self.target_layer_ids),
            "mask_token_id": self.mask_token_id,
            "markov_rank": self.markov_rank,
            "block_size": self.block_size,
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": self.confidence and self.confidence_with_markov,
            "sample_from_anchor": True,
            "is_causal": False,
        }
        if self.head != "none":
            values["markov_head_type"] = HEAD_TYPES[self.head]
        if self.draft_vocab_size is not None:
            values["draft_vocab_size"] = self.draft_vocab_size
        values["dspark"] = {
            "format": FORMAT,
            "head": self.head,
            "token_free_confidence": self.token_free_confidence,
            "target": None if self.target is None else self.target.to_dict(),
        }
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DrafterConfig":
        """Read the content of a config.json: ours, DeepSpec's or speculators'.

        Raises:
            DrafterError: a key is missing, a value is outside its range, or a feature is not supported.
        """
        if "speculators_model_type" in values or "aux_hidden_state_layer_ids" in values:
            values = _from_speculators(values)
        _refuse_unsupported(values)
        own = _own_settings(values)
        values = {**_QWEN3_DEFAULTS, **values}
        vocab, draft_vocab = values.get("vocab_size"), values.get("draft_vocab_size")
        confidence = bool(values.get("enable_confidence_head", False))
        try:
            return cls(
                hidden_size=values["hidden_size"],
                num_layers=values["num_hidden_layers"],
                num_heads=values["num_attention_heads"],
                num_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
                head_dim=values["head_dim"],
                ffn_size=values["intermediate_size"],
                vocab_size=values["vocab_size"],
                target_layer_ids=_layer_ids(values, "target_layer_ids", EMBEDDING_TAP),
                mask_token_id=values["mask_token_id"],
                block_size=values["block_size"],
                rms_eps=values["rms_norm_eps"],
                rope_theta=_rope(values).get("rope_theta") or values.get("rope_theta") or _QWEN3_THETA,
                context=values["max_position_embeddings"],
                head=own.get("head", _head_name(values)),
                markov_rank=values["markov_rank"],
                confidence=confidence,
                confidence_with_markov=confidence and bool(values.get("confidence_head_with_markov", False)),
                token_free_confidence=bool(own.get("token_free_confidence", False)),
                draft_vocab_size=None if draft_vocab == vocab else draft_vocab,
                target=_fingerprint(own.get("target")),
            )
        except KeyError as missing:
            raise DrafterError(f"Drafter setting {missing} is missing; its config.json must name it.") from None

    @classmethod
    def load(cls, folder: Path) -> "DrafterConfig":
        """Read `folder`/config.json. Raises DrafterError, naming the folder."""
        path = folder / "config.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise DrafterError(f"{folder} has no config.json; give the folder of a trained drafter.") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DrafterError(f"{path} is not valid JSON ({error}); copy or train the drafter again.") from None
        if not isinstance(values, dict):
            raise DrafterError(f"{path} holds a JSON {type(values).__name__}, not an object; copy the drafter again.")
        try:
            return cls.from_dict(values)
        except DrafterError as error:
            raise DrafterError(f"{path}: {error}") from None


def _layer_ids(values: Mapping[str, Any], name: str, embedding: int) -> tuple[int, ...]:
    _check_layer_ids(values.get(name), name, embedding)
    return tuple(values[name])


def _rope(values: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling.
    return values.get("rope_parameters") or values.get("rope_scaling") or {}


def _head_name(values: Mapping[str, Any]) -> str:
    """The head of a folder without our own key: rank 0 means none (DeepSpec and speculators)."""
    if values.get("markov_rank") == 0:
        return "none"
    kind = values.get("markov_head_type", "vanilla")
    names = {theirs: ours for ours, theirs in HEAD_TYPES.items()}
    _check(kind in names, "markov_head_type", kind, f"one of {', '.join(names)}")
    return names[kind]


def _own_settings(values: Mapping[str, Any]) -> Mapping[str, Any]:
    own = values.get("dspark", {"format": FORMAT})
    _check(isinstance(own, dict), "dspark", own, "an object")
    version = own.get("format")
    if version != FORMAT:
        raise DrafterError(
            f"Drafter setting dspark.format is {version!r}; this version of dspark reads {FORMAT}, so install the "
            "version that wrote it or train the drafter again."
        )
    for key in own:
        _check(key in _OWN_KEYS, f"dspark.{key}", own[key], f"only the keys {', '.join(_OWN_KEYS)}")
    return own


def _fingerprint(values: Any) -> Fingerprint | None:
    if values is None:
        return None
    _check(isinstance(values, dict), "dspark.target", values, "an object with the fingerprint of the target")
    return Fingerprint.from_dict(values)


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    architecture = (values.get("architectures") or ["none"])[0]
    _check(architecture == ARCHITECTURE, "architectures", architecture, ARCHITECTURE)
    _check(values.get("model_type", "qwen3") == "qwen3", "model_type", values.get("model_type"), "qwen3")
    for name, allowed in (
        ("attention_bias", False),
        ("is_causal", False),
        ("hidden_act", "silu"),
        ("sample_from_anchor", True),
        ("logit_scale", 1.0),
    ):
        _check(values.get(name, allowed) == allowed, name, values.get(name), f"{json.dumps(allowed)} here")
    kind = _rope(values).get("rope_type") or _rope(values).get("type") or "default"
    _check(kind == "default", "rope_type", kind, "default (drafters have plain rotary positions)")
    layers = set(values.get("layer_types") or ()) - {"full_attention"}
    _check(not layers, "layer_types", sorted(layers), "full_attention in every layer")


def _from_speculators(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a vllm-project/speculators folder in the terms of ours.

    It nests the decoder's sizes, counts taps as Hugging Face does (0 = embedding, so ours + 1), and older versions
    left `sample_from_anchor` out while predicting at the masks only, so a folder without it cannot be trusted.
    """
    kind = values.get("speculators_model_type", "dspark")
    _check(kind == "dspark", "speculators_model_type", kind, "dspark")
    _check("sample_from_anchor" in values, "sample_from_anchor", None, "true, which a speculators folder must state")
    inner: Any = values.get("transformer_layer_config")
    _check(isinstance(inner, dict), "transformer_layer_config", inner, "an object with the sizes of the decoder")
    taps = _layer_ids(values, "aux_hidden_state_layer_ids", EMBEDDING_TAP + 1)
    # The nested sizes win over the outer file's; its model_type says "which speculator", not "which decoder".
    outer = {key: value for key, value in values.items() if key != "model_type"}
    inner_types = {"model_type": inner.get("model_type", "qwen3"), "architectures": [ARCHITECTURE]}
    return {**outer, **inner, **inner_types, "target_layer_ids": [tap - 1 for tap in taps]}
