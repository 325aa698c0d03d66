"""What the frozen target says about each sequence: tapped layers for the drafter's context, and its distributions.

Computed once per sequence and kept in memory up to a bound; the rest is computed again whenever it is needed. Either
way a sequence has the same numbers, bit for bit, because every sequence passes through the target alone and is
rounded to what the cache would hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.data import Corpus
from dspark.target import Decoder, PassRow
from dspark.target.layers import rms_norm

_PASS_TOKENS = 512
_HEAD_ROWS = 64  # rows of full-vocabulary logits at a time: 12 MB at 49152 tokens


@dataclass(frozen=True)
class Features:
    """One sequence of T tokens whose response begins at position P.

    `taps[j]` belongs to position j (0..T-2). `hidden[j]` and `log_z[j]` belong to position P + j (up to T-2) and give
    the target's distribution of the token after it: `softmax = exp(head(hidden) - log_z)`.
    """

    taps: Float[Tensor, "T-1 L*D"]
    hidden: Float[Tensor, "R-1 D"]
    log_z: Float[Tensor, " R-1"]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.taps, self.hidden, self.log_z))


def target_probs(
    features: Features, rows: Int[Tensor, " P"], head_rows: Float[Tensor, "V_draft D"]
) -> Float[Tensor, "P V_draft"]:
    """The target's probabilities of the draft vocabulary, normalised over the full one, at response offsets `rows`."""
    hidden = features.hidden[rows].to(head_rows.dtype)
    return torch.addmm(-features.log_z[rows, None], hidden, head_rows.T).exp_()


class FeatureStore:
    """Features of a corpus. What fits `cache_bytes` stays, first come first kept: batches are shuffled, so no choice
    of what to keep is better than another."""

    def __init__(self, decoder: Decoder, taps: Sequence[int], corpus: Corpus, cache_bytes: float):
        self._decoder, self._taps, self._corpus = decoder, tuple(taps), corpus
        self._left = cache_bytes
        self._kept: dict[int, Features] = {}
        self._pool = decoder.new_pool(max(map(corpus.length, range(len(corpus)))) + _PASS_TOKENS)

    @property
    def cached_tokens(self) -> int:
        return sum(self._corpus.length(i) for i in self._kept)

    def holds(self, index: int) -> bool:
        """Whether a sequence's features are in memory."""
        return index in self._kept

    def __getitem__(self, index: int) -> Features:
        found = self._kept.get(index)
        if found is None:
            found = self.compute(index)
            if found.num_bytes <= self._left:
                self._left -= found.num_bytes
                self._kept[index] = found
        return found

    @torch.no_grad()
    def compute(self, index: int) -> Features:
        """One run of the target over a sequence."""
        decoder = self._decoder
        ids = self._corpus.sequence(index)[:-1].to(decoder.device)
        prompt_len = self._corpus.prompt_lens[index]
        outputs, tapped = [], []
        for first in range(0, ids.shape[0], _PASS_TOKENS):
            part = ids[first : first + _PASS_TOKENS]
            hidden, taps = decoder.run(part, [PassRow(0, first, part.shape[0])], self._pool, self._taps)
            assert taps is not None
            outputs.append(hidden)
            tapped.append(taps)
        normed = rms_norm(torch.cat(outputs)[prompt_len:], decoder.final_norm, decoder.spec.rms_eps)
        hidden = _compact(normed)
        pieces = torch.split(hidden.to(decoder.dtype), _HEAD_ROWS)
        log_z = torch.cat([decoder.head(rows).float().logsumexp(dim=-1) for rows in pieces])
        return Features(_compact(torch.cat(tapped)), hidden, log_z)


def feature_bytes(decoder: Decoder, taps: Sequence[int], corpus: Corpus) -> int:
    """Memory the whole corpus would take, without running it."""
    width = decoder.spec.hidden_size
    responses = corpus.response_tokens
    return 2 * width * (len(taps) * corpus.ids.shape[0] + responses) + 4 * responses


def _compact(values: Tensor) -> Tensor:
    """In float16 where its range suffices: activations of large models can exceed it."""
    half = values.to(torch.float16)
    return half if bool(half.isfinite().all()) else values.float()
