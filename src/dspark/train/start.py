"""Where a run begins: mask token, draft vocabulary, sizes, first weights."""

from collections.abc import Collection

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.data import Corpus
from dspark.drafter import DrafterConfig, DraftVocabulary, random_tensors
from dspark.errors import TrainError
from dspark.target import Target
from dspark.target.decoder import EMBEDDING_TAP
from dspark.train.settings import TrainSettings

_SPECIAL_ROLES = ("pad_token", "eos_token", "bos_token", "unk_token")
_BIGRAM_SMOOTHING = 2.0  # pseudo-counts of the unigram distribution in each row of bigrams
_LARGEST_BIAS = 8.0  # nats: what a rare pair's count may claim
FIRST_NORM = 0.05  # of the target's final norm: the backbone speaks softly until it has learned something


def token_counts(corpus: Corpus, vocab_size: int) -> Int[Tensor, " V"]:
    """How often each id occurs in responses."""
    responses = torch.cat([corpus.response(i) for i in range(len(corpus))])
    return torch.bincount(responses, minlength=vocab_size)


def choose_mask_id(used: Collection[int], forbidden: Collection[int], vocab_size: int) -> int:
    """The smallest id that occurs nowhere in the data and has no role of its own.

    Raises:
        TrainError: every id is used.
    """
    taken = set(used) | set(forbidden)
    for token in range(vocab_size):
        if token not in taken:
            return token
    raise TrainError("Every token id occurs in the data, so none is free to stand for masks; give --mask-token-id.")


def special_ids(target: Target) -> set[int]:
    """Ids with a role: end, padding, begin, unknown."""
    named = {target.tokenizer.special_id(role) for role in _SPECIAL_ROLES}
    return {i for i in named | {target.spec.bos_id} if i is not None} | set(target.spec.eos_ids)


def choose_draft_vocab(counts: Int[Tensor, " V"], size: int, always: Collection[int]) -> Int[Tensor, " V_draft"]:
    """The `size` most frequent ids, ascending, ties to the smaller id; `always` are among them."""
    ranked = counts.clone()
    ranked[list(always)] = counts.max() + 1
    return ranked.argsort(descending=True, stable=True)[:size].sort().values


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Three taps of a target: a third of the way in, two thirds, and the last that can be tapped (8, 18, 28 of 30)."""
    last = num_layers - 2
    return tuple(sorted({round(last * share) for share in (0.3, 0.65, 1.0)})) if last > 0 else (last,)


def drafter_config(target: Target, settings: TrainSettings, mask_token_id: int) -> DrafterConfig:
    """Sizes of the drafter: the target's, where a setting does not say otherwise.

    Raises:
        TrainError: the target has no such tap.
        DrafterError: a head count or a vocabulary does not fit the target.
    """
    spec = target.spec
    missing = [tap for tap in settings.taps if not EMBEDDING_TAP <= tap < spec.num_layers - 1]
    if missing:
        raise TrainError(
            f"There is no tap {missing[0]}: a target of {spec.num_layers} layers has taps {EMBEDDING_TAP} (the "
            f"embedding) to {spec.num_layers - 2}, and its last layer is refused; give others as --taps."
        )
    full = settings.draft_vocab is None or settings.draft_vocab >= spec.vocab_size
    config = DrafterConfig(
        hidden_size=spec.hidden_size,
        num_layers=settings.layers,
        num_heads=spec.num_heads,
        num_kv_heads=settings.kv_heads or spec.num_heads,
        head_dim=spec.head_dim,
        ffn_size=spec.ffn_size,
        vocab_size=spec.vocab_size,
        target_layer_ids=settings.taps,
        mask_token_id=mask_token_id,
        block_size=settings.block_size,
        rms_eps=spec.rms_eps,
        rope_theta=spec.rope_theta,
        context=spec.context,
        head=settings.head,
        markov_rank=settings.rank if settings.head != "none" else 0,
        confidence_with_markov=settings.head != "none",
        token_free_confidence=True,
        draft_vocab_size=None if full else settings.draft_vocab,
        target=target.fingerprint,
    )
    config.check_fits(spec, target.tokenizer.special_id("pad_token"))
    return config


def first_tensors(
    config: DrafterConfig,
    corpus: Corpus,
    settings: TrainSettings,
    always: Collection[int],
    final_norm: Float[Tensor, " D"],
) -> dict[str, Tensor]:
    """Weights before the first step, float32, a function of data and seed.

    Layers begin as the identity (their output projections are 0), so that early gradients meet no noise; the Markov
    head begins at the data's bigrams.
    """
    tensors = random_tensors(config, settings.seed)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")) or "confidence" in name:
            tensors[name] = torch.zeros_like(tensors[name])
    tensors["norm.weight"] = FIRST_NORM * final_norm.float()
    ids = torch.arange(config.vocab_size)
    if config.draft_vocab_size is not None:
        ids = choose_draft_vocab(token_counts(corpus, config.vocab_size), config.draft_vocab_size, always)
        tensors["d2t"] = DraftVocabulary(ids, config.vocab_size).offsets()
    if config.head == "markov" and settings.bigrams:
        w1, w2 = bigram_head(corpus, ids, config.vocab_size, config.markov_rank, settings.seed)
        tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"] = w1, w2
    return tensors


def bigram_head(
    corpus: Corpus, draft_ids: Int[Tensor, " V_draft"], vocab_size: int, rank: int, seed: int
) -> tuple[Float[Tensor, "V r"], Float[Tensor, "V_draft r"]]:
    """W1, W2 with `W2 W1[x]` near the log-probabilities of what follows x in the responses.

    Smoothed with s pseudo-counts of the unigrams u, log P(y|x) = log u_y + log(1 + C_xy / (s u_y)) up to a constant of
    the row, which softmax ignores. The first part is one column; the second is 0 for pairs never seen, and its best
    approximation of rank r - 1 comes from a randomised singular value decomposition.
    """
    to_draft = torch.full((vocab_size,), -1, dtype=torch.int64)
    to_draft[draft_ids] = torch.arange(draft_ids.shape[0])
    pairs = [torch.stack((corpus.response(i)[:-1], to_draft[corpus.response(i)[1:]])) for i in range(len(corpus))]
    joined = torch.cat(pairs, dim=1)
    counted = torch.sparse_coo_tensor(
        joined[:, joined[1] >= 0],
        torch.ones(int((joined[1] >= 0).sum())),
        (vocab_size, draft_ids.shape[0]),
        check_invariants=False,
    ).coalesce()
    unigram = (token_counts(corpus, vocab_size)[draft_ids] + 1.0) / (corpus.response_tokens + draft_ids.shape[0])
    gain = (counted.values() / (_BIGRAM_SMOOTHING * unigram[counted.indices()[1]])).log1p().clamp(max=_LARGEST_BIAS)
    w1 = torch.zeros(vocab_size, rank)
    w2 = torch.zeros(draft_ids.shape[0], rank)
    centred = unigram.log() - unigram.log().mean()
    size = centred.square().mean().sqrt().clamp(min=1e-6)  # split evenly, so that both sides learn alike
    w1[:, 0], w2[:, 0] = size.sqrt(), centred / size.sqrt()
    more = min(rank - 1, *counted.shape)
    if more > 0 and gain.numel():
        matrix = torch.sparse_coo_tensor(counted.indices(), gain, counted.shape, check_invariants=False).coalesce()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            u, s, v = torch.svd_lowrank(matrix, q=more, niter=4)
        w1[:, 1 : 1 + more], w2[:, 1 : 1 + more] = u * s.sqrt(), v * s.sqrt()
    # Tokens no row was counted for, and unused columns, still need somewhere for gradients to begin.
    generator = torch.Generator().manual_seed(seed)
    w1 += 1e-3 * torch.randn(w1.shape, generator=generator)
    w2 += 1e-3 * torch.randn(w2.shape, generator=generator)
    return w1, w2
