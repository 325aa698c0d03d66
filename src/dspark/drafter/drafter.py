"""One drafter, ready to guess: backbone, sequential head, confidence, and the target's embedding and head it shares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from dspark.drafter.backbone import Backbone
from dspark.drafter.config import DrafterConfig
from dspark.drafter.heads import ConfidenceHead, SequentialHead, apply_rows, build_head
from dspark.drafter.vocabulary import DraftVocabulary
from dspark.target.decoder import Decoder, PassRow
from dspark.target.kv import KvPool
from dspark.target.linear import Linear, LinearFactory, PlainLinear


@dataclass(frozen=True)
class Drafter:
    """Everything `propose_block` and a trainer need. Stateless: the context lives in a pool of `new_pool`.

    `confidence` sees the previous token, `token_free` only the backbone's hidden state; either may be None.
    `vocabulary` is None when every target token can be drafted. `warnings` are sentences for the caller to log.
    """

    config: DrafterConfig
    backbone: Backbone
    head: SequentialHead
    confidence: ConfidenceHead | None
    token_free: ConfidenceHead | None
    vocabulary: DraftVocabulary | None
    embedding: Float[Tensor, "V D"]
    lm_head: Linear
    dtype: torch.dtype
    device: torch.device
    warnings: tuple[str, ...] = ()

    def new_pool(self, slots: int) -> KvPool:
        """A context cache with as many slots as the target's pool: a request has the same slot range in both."""
        config = self.config
        return KvPool(config.num_layers, config.num_kv_heads, config.head_dim, slots, self.dtype, self.device)

    def append_context(self, taps: Float[Tensor, "T L*D"], rows: Sequence[PassRow], pool: KvPool) -> None:
        """Take in the target's tapped features of committed positions; see `Backbone.append_context`."""
        self.backbone.append_context(taps, rows, pool)

    def embed(self, ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows D"]:
        return F.embedding(ids, self.embedding).to(self.dtype)

    def masked_block(self, anchors: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        """Input ids of a block: the anchor, then masks."""
        masks = anchors.new_full((anchors.shape[0], self.config.block_size - 1), self.config.mask_token_id)
        return torch.cat((anchors[:, None], masks), dim=1)

    def block_pass(self, ids: Int[Tensor, "B K"], rows: Sequence[PassRow], pool: KvPool) -> Float[Tensor, "B K D"]:
        """One backbone pass over the block ids; see `Backbone.block_pass` for rows and room."""
        return self.backbone.block_pass(self.embed(ids), rows, pool)

    def base_logits(self, hidden: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows V_draft"]:
        """U: what the backbone alone says, over the draft vocabulary."""
        return apply_rows(self.lm_head, hidden)

    def full_logits(self, logits: Float[Tensor, "*rows V_draft"]) -> Float[Tensor, "*rows V"]:
        """The same logits over the target's vocabulary, -inf where the drafter cannot propose."""
        return logits if self.vocabulary is None else self.vocabulary.expand(logits)


def build_drafter(
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    target: Decoder,
    make: LinearFactory,
    share_head: bool = True,
    warnings: tuple[str, ...] = (),
) -> Drafter:
    """Put a drafter together over checkpoint tensors whose names and shapes are already checked.

    Serving packs linears with the target's factory and shares the target's packed head. Training passes `PlainLinear`
    and `share_head=False`, since packed linears have no gradient; gradients then reach `tensors`. Embedding and head
    hold the target's numbers unless the tensors bring different ones.

    Raises:
        DrafterError: `d2t` does not fit the target's vocabulary.
    """
    device, dtype = target.device, target.dtype
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    vocabulary = None
    if "d2t" in tensors:
        vocabulary = DraftVocabulary.from_offsets(tensors["d2t"], config.vocab_size)
    if config.draft_vocab_size is None:
        vocabulary = None  # ascending offsets over the whole vocabulary can only be zeros
    # A block may start at the target's last position.
    positions = max(config.context, target.spec.context) + config.block_size

    return Drafter(
        config=config,
        backbone=Backbone(config, tensors, make, dtype, device, positions),
        head=build_head(config, tensors, make),
        confidence=_confidence(config, tensors, dtype),
        token_free=_token_free(config, tensors, dtype),
        vocabulary=vocabulary,
        embedding=_embedding(tensors.get("embed_tokens.weight"), target),
        lm_head=_lm_head(tensors.get("lm_head.weight"), vocabulary, target, make, share_head),
        dtype=dtype,
        device=device,
        warnings=warnings,
    )


def with_weights(
    drafter: Drafter, tensors: Mapping[str, Tensor], positions: int, make: LinearFactory = PlainLinear
) -> Drafter:
    """The same drafter over other weights, in float32: what a trainer builds every step.

    Everything frozen (embedding, head, vocabulary) is taken over as it is, and rotary tables reach `positions` only,
    so that this costs a few copies. Gradients reach `tensors`, given a `make` whose linears have them.
    """
    config, dtype = drafter.config, torch.float32
    return replace(
        drafter,
        backbone=Backbone(config, tensors, make, dtype, drafter.device, positions),
        head=build_head(config, tensors, make),
        dtype=dtype,
        confidence=_confidence(config, tensors, dtype),
        token_free=_token_free(config, tensors, dtype),
    )


def _confidence(config: DrafterConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> ConfidenceHead | None:
    with_markov = config.confidence_with_markov
    return _confidence_head("confidence_head", tensors, dtype, with_markov) if config.confidence else None


def _token_free(config: DrafterConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> ConfidenceHead | None:
    if not config.token_free_confidence:
        return None
    return _confidence_head("confidence_head_token_free", tensors, dtype, False)


def _confidence_head(name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype, with_markov: bool) -> ConfidenceHead:
    weight, bias = tensors[f"{name}.proj.weight"].to(dtype), tensors[f"{name}.proj.bias"].to(dtype)
    return ConfidenceHead(weight, bias, with_markov)


def _same(own: Tensor, theirs: Tensor) -> bool:
    return own is theirs or (own.shape == theirs.shape and torch.equal(own.to(theirs.dtype), theirs))


def _embedding(own: Tensor | None, target: Decoder) -> Tensor:
    # DeepSpec's folders hold a copy of the frozen table; a copy costs memory and nothing is gained by keeping it.
    return target.embedding if own is None or _same(own, target.embedding) else own


def _lm_head(
    own: Tensor | None, vocabulary: DraftVocabulary | None, target: Decoder, make: LinearFactory, share: bool
) -> Linear:
    rows = target.head_weight if vocabulary is None else target.head_weight[vocabulary.ids]
    if own is not None and not _same(own, rows):
        rows = own
    elif share and vocabulary is None:
        return target.head
    return make(rows.to(target.device, target.dtype), None)
