"""What the frozen target says about each sequence: tapped layers for the drafter's context, and its distributions.

Computed once per sequence and kept in memory up to a bound, and on disk where a folder is given; the rest is computed
again whenever it is needed. Either way a sequence has the same numbers, bit for bit, because every sequence passes
through the target alone and is rounded to what the cache would hold.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.data import Corpus
from dspark.target import Decoder, PassRow, Target
from dspark.target.layers import rms_norm
from dspark.train.disk import FeatureDisk

PASS_TOKENS = 512
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


@dataclass(frozen=True)
class CacheLimits:
    """What features may take: bytes of memory, and of the disk under `folder` (None: none there). With `probs` memory
    that all features together leave over is for the target's probabilities of the draft vocabulary."""

    memory_bytes: float = 4e9
    folder: Path | None = None
    disk_bytes: float = 0.0
    probs: bool = False

    def open_disk(self, target: Target, taps: Sequence[int], writers: int = 1) -> FeatureDisk | None:
        """The folder of this target and these taps, and of the kernels, which also decide the numbers.

        Raises:
            TrainError: the folder cannot be written.
        """
        if self.folder is None:
            return None
        decoder = target.decoder
        kernels = (type(decoder.head).__name__, str(decoder.dtype), decoder.device.type, decoder.exact)
        rest = hashlib.sha256(repr((tuple(taps), kernels)).encode()).hexdigest()[:16]
        return FeatureDisk(self.folder, f"{target.fingerprint.weights}-{rest}", self.disk_bytes, writers)


def target_probs(
    features: Features, rows: Int[Tensor, " P"], head_rows: Float[Tensor, "V_draft D"]
) -> Float[Tensor, "P V_draft"]:
    """The target's probabilities of the draft vocabulary, normalised over the full one, at response offsets `rows`."""
    hidden = features.hidden[rows].to(head_rows.dtype)
    return torch.addmm(-features.log_z[rows, None], hidden, head_rows.T).exp_()


class DraftProbs:
    """The target's probabilities of the draft vocabulary at response positions of a corpus's texts.

    Kept in float16 when those of all texts fit `limit_bytes`, which saves a matrix product each time a position is
    seen; computed when asked for otherwise. Whether they are kept thus depends on the limit and the data alone, not on
    which texts came first, and a resumed run has the same numbers.
    """

    def __init__(self, head_rows: Float[Tensor, "V_draft D"], corpus: Corpus, limit_bytes: float):
        self._head_rows = head_rows
        self.num_bytes = 2 * head_rows.shape[0] * (corpus.response_tokens - len(corpus))
        self._kept: dict[int, Tensor] | None = {} if self.num_bytes <= limit_bytes else None

    @property
    def keeps(self) -> bool:
        return self._kept is not None

    def __call__(self, index: int, features: Features, rows: Int[Tensor, " N"]) -> Float[Tensor, "N V_draft"]:
        """Of text `index` at response offsets `rows`, which may repeat."""
        if self._kept is None:
            places, which = torch.unique(rows, return_inverse=True)
            return target_probs(features, places, self._head_rows)[which]
        if index not in self._kept:
            everywhere = torch.arange(features.hidden.shape[0], device=rows.device)
            self._kept[index] = target_probs(features, everywhere, self._head_rows).half()
        return self._kept[index][rows].float()


class FeatureStore:
    """Features of a corpus. What fits `cache_bytes` stays in memory, first come first kept: batches are shuffled, so
    no choice of what to keep is better than another. `disk` keeps what was computed for later and for other runs."""

    def __init__(
        self,
        decoder: Decoder,
        taps: Sequence[int],
        corpus: Corpus,
        cache_bytes: float,
        disk: FeatureDisk | None = None,
    ):
        self._decoder, self._taps, self._corpus = decoder, tuple(taps), corpus
        self.cache_bytes, self.disk = cache_bytes, disk
        self._left = cache_bytes
        self._kept: dict[int, Features] = {}
        self._pool = decoder.new_pool(max(map(corpus.length, range(len(corpus)))) + PASS_TOKENS)

    @property
    def cached_tokens(self) -> int:
        return sum(self._corpus.length(i) for i in self._kept)

    def holds(self, index: int) -> bool:
        """Whether a sequence's features need no run of the target."""
        return index in self._kept or (self.disk is not None and self.disk.holds(self._corpus.text_digest(index)))

    @property
    def on_disk_bytes(self) -> int:
        """Of this corpus's features."""
        if self.disk is None:
            return 0
        return self.disk.bytes_of(self._corpus.text_digest(i) for i in range(len(self._corpus)))

    def __getitem__(self, index: int) -> Features:
        found = self._kept.get(index)
        if found is None:
            found = self._from_disk(index) or self._computed(index)
            if found.num_bytes <= self._left:
                self._left -= found.num_bytes
                self._kept[index] = found
        return found

    def _from_disk(self, index: int) -> Features | None:
        tensors = self.disk.get(self._corpus.text_digest(index)) if self.disk is not None else None
        device = self._decoder.device
        return None if tensors is None else Features(**{name: t.to(device) for name, t in tensors.items()})

    def _computed(self, index: int) -> Features:
        found = self.compute(index)
        if self.disk is not None:
            tensors = {"taps": found.taps, "hidden": found.hidden, "log_z": found.log_z}
            self.disk.put(self._corpus.text_digest(index), tensors)
        return found

    @torch.no_grad()
    def compute(self, index: int) -> Features:
        """One run of the target over a sequence."""
        decoder = self._decoder
        ids = self._corpus.sequence(index)[:-1].to(decoder.device)
        prompt_len = self._corpus.prompt_lens[index]
        outputs, tapped = [], []
        for first in range(0, ids.shape[0], PASS_TOKENS):
            part = ids[first : first + PASS_TOKENS]
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
    width, count = decoder.spec.hidden_size, len(corpus)  # nothing is asked about what follows a text's last token
    inputs, responses = corpus.ids.shape[0] - count, corpus.response_tokens - count
    return 2 * width * (len(taps) * inputs + responses) + 4 * responses


def _compact(values: Tensor) -> Tensor:
    """In float16 where its range suffices: activations of large models can exceed it."""
    half = values.to(torch.float16)
    return half if bool(half.isfinite().all()) else values.float()
