"""Heads that begin by finding where the text has been here before, and saying what followed there.

Text repeats itself, greedy text above all, and attention that finds an earlier occurrence of the last tokens is slow to
emerge: a drafter that has seen half a million blocks may still not have it. Everything such attention needs can be read
from the target's features by linear maps, measured on a few texts (ridge regression): which token stands at a
position, which ones stand before it, and what the target says comes next. First weights are put together from them:

- A token's *code* is a projection of its embedding on a few random directions, orthogonal to the mask's embedding.
- `fc` lays the code of each position's own token where the code of a block's token lies, so that one value projection
  reads both, and codes of the tokens there and before in places of their own, for keys.
- First layer: two of the heads that look a fixed distance back bring the codes of the last tokens to every slot; two
  others match the anchor against the token before each position, and bring the code of the token there.
- Second layer: heads match two or three last tokens at once. Some bring codes, four bring what the target says comes
  next, in four slices of its largest directions.

Content is matched in the slowest rotary pairs, where a position of the same text looks alike from near and far.
`fc` and these queries and keys are normalised behind, so their size means nothing but how slowly training changes them;
it is chosen large, or the first hundred noisy steps would wash out what was laid down.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dspark.data import Corpus
from dspark.drafter import DrafterConfig
from dspark.target.layers import rms_norm
from dspark.train.distance import constant_pair, ridge, steady_direction, usual_distances
from dspark.train.features import FeatureStore
from dspark.train.start import FIRST_NORM

LOOK_BACK = 3  # tokens whose codes are looked for in a position's features: there, one before, two before
LEAST_HEADS, LEAST_WIDTH = 9, 512  # smaller drafters have no room for all this
_CODE, _KEY_CODE = 64, 48  # directions of a token's code, and of the part that keys and carriers hold
_PREDICTION = 200  # directions of the target's prediction kept by `fc`
_SLICES = 4  # heads that share one match, each with a slice of the prediction
_SLOW = 0.014  # radians a position: of the rotary pairs content is matched in
_GAINS = (2**0.5, 2.0)  # of queries and keys, by layer
_FC_SIZE, _MATCH_SIZE = 10.0, 20.0  # how slowly these change
_CARRIED, _SAID = 2.0, 1.0  # sizes of what heads write, in embeddings
_LOUD = 2.0  # times the usual first size of the final norm, since there is something to say
_RIDGE = 0.03
_EVIDENCE_TEXTS = 64
_COMMON = (0.01, 0.7)  # share of the embedding's directions, by variance, that codes avoid and draw from


@dataclass(frozen=True)
class Evidence:
    """Features of N positions of real text, and what is to be read from them.

    Args:
        taps: each dimension divided by its usual size.
        ids: the token at the position, the one before it, the one two before.
        hidden: what the target's head reads, at the positions `rows`.
    """

    taps: Float[Tensor, "N L*D"]
    ids: Int[Tensor, "N look_back"]
    hidden: Float[Tensor, "M D"]
    rows: Int[Tensor, " M"]


def read_evidence(store: FeatureStore, corpus: Corpus, sizes: Float[Tensor, " L*D"]) -> Evidence | None:
    """From texts spread over the corpus, without the first positions, where models keep a few huge numbers; None where
    all prompts are shorter than what is looked for, or no response says anything."""
    taps, ids, hidden, rows, count = [], [], [], [], 0
    usable = [i for i, length in enumerate(corpus.prompt_lens) if length >= LOOK_BACK]
    for index in usable[:: -(-len(usable) // _EVIDENCE_TEXTS) or 1]:
        features, text = store[index], corpus.sequence(index).cpu()
        last, first = len(text) - 1, min(LOOK_BACK + 1, corpus.prompt_lens[index])
        taps.append(features.taps[first:].float().cpu() / sizes)
        ids.append(torch.stack([text[first - back : last - back] for back in range(LOOK_BACK)], dim=1))
        hidden.append(features.hidden.float().cpu())
        rows.append(torch.arange(corpus.prompt_lens[index], last) - first + count)
        count += last - first
    if not sum(map(len, rows)):
        return None
    return Evidence(torch.cat(taps), torch.cat(ids), torch.cat(hidden), torch.cat(rows))


def has_room(config: DrafterConfig) -> bool:
    """Whether a drafter is large enough for heads that copy."""
    return config.num_kv_heads >= LEAST_HEADS and config.hidden_size >= LEAST_WIDTH and config.head_dim >= _CODE


def copying_tensors(
    config: DrafterConfig,
    tensors: dict[str, Tensor],
    evidence: Evidence,
    embedding: Float[Tensor, "V D"],
    final_norm: Float[Tensor, " D"],
    seed: int,
) -> dict[str, Tensor]:
    """New `fc` (of taps as in `evidence`), `norm` and attention weights of the first layers; nothing where no steady
    direction is found (see `distance.py`).

    Args:
        tensors: the usual first weights, which stay for all other heads.
        embedding: of every token, as a block's input has it.
    """
    generator = torch.Generator().manual_seed(seed)
    normed = rms_norm(embedding, torch.ones(config.hidden_size), config.rms_eps)
    codes = _Codes.draw(normed, config.mask_token_id, generator)
    context = _Context.build(config, evidence, codes, normed, generator)
    blocks = torch.cat((normed[evidence.ids[:, 0]][:2000], normed[config.mask_token_id].expand(2000, -1)))
    steady = steady_direction(torch.cat((context.samples[: len(blocks)], blocks))), steady_direction(blocks)
    if steady[0] is None or steady[1] is None:
        return {}
    loudness = (final_norm / final_norm.abs().mean()).clamp(min=0.3)
    size = float(embedding.square().mean().sqrt())
    layers = [_Layer(config, tensors, i) for i in range(min(2, config.num_layers))]
    _first_layer(config, layers[0], codes, context, (steady[0], steady[1]), loudness, size, generator)
    if len(layers) > 1:
        _second_layer(layers[1], codes, context, loudness, size, generator)
    found = {"fc.weight": context.fc.T * _FC_SIZE, "norm.weight": _LOUD * FIRST_NORM * final_norm}
    for layer in layers:
        found |= layer.tensors()
    return {name: t.float().contiguous() for name, t in found.items()}


@dataclass(frozen=True)
class _Codes:
    """Orthonormal directions of the embedding: of a token's own code, of where the codes of the last two tokens are
    carried to, and of the code that says what to draft."""

    own: Float[Tensor, "C D"]
    carriers: tuple[Float[Tensor, "c D"], Float[Tensor, "c D"]]
    said: Float[Tensor, "C D"]

    @classmethod
    def draw(cls, normed: Tensor, mask_token_id: int, generator: torch.Generator) -> "_Codes":
        width = normed.shape[1]
        _, directions = torch.linalg.eigh(torch.cov(normed.T))
        basis = directions[:, int(width * (1 - _COMMON[1])) : width - int(width * _COMMON[0])]
        avoid = torch.linalg.qr(torch.stack((normed.mean(0), normed[mask_token_id]), dim=1))[0]
        sizes = [_CODE, _KEY_CODE, _KEY_CODE, _CODE]
        # Projected, not combined: the signs of eigenvectors are the processor's choice.
        drawn = basis @ (basis.T @ torch.randn(width, sum(sizes), generator=generator))
        directions = torch.linalg.qr(drawn - avoid @ (avoid.T @ drawn))[0].T
        own, one, two, said = torch.split(directions, sizes)
        return cls(own, (one, two), said)

    def without_carried(self, written: Float[Tensor, "D n"]) -> Float[Tensor, "D n"]:
        """What a head writes, kept out of where codes are read."""
        kept = torch.cat((self.own, *self.carriers))
        return written - kept.T @ (kept @ written)


@dataclass(frozen=True)
class _Context:
    """`fc`, and how to read from what comes out of it."""

    fc: Float[Tensor, "L*D D"]
    samples: Float[Tensor, "N D"]
    keys: tuple[Float[Tensor, "c D"], ...]  # code of the token there, one before, two before
    said: Float[Tensor, "C D"]  # code to draft the token there
    slices: tuple[tuple[Float[Tensor, "h D"], Float[Tensor, "D h"]], ...]  # of the prediction: read, write
    mean: Float[Tensor, " D"]  # of the target's hidden states, in the units of `slices`

    @classmethod
    def build(
        cls, config: DrafterConfig, evidence: Evidence, codes: _Codes, normed: Tensor, generator: torch.Generator
    ) -> "_Context":
        taps, width = evidence.taps, config.hidden_size
        own = [normed[evidence.ids[:, back]] @ codes.own.T for back in range(LOOK_BACK)]
        mean = evidence.hidden.mean(0)
        told = ridge(taps[evidence.rows], evidence.hidden - mean, _RIDGE)
        largest = largest_directions(taps @ told, min(_PREDICTION, width // 3))
        parts = [ridge(taps, code[:, :_KEY_CODE], _RIDGE) for code in own]
        parts += [ridge(taps, normed[evidence.ids[:, 0]] @ codes.said.T, _RIDGE), told @ largest]
        rest = width - _CODE - sum(part.shape[1] for part in parts)
        parts.append(torch.randn(taps.shape[1], rest, generator=generator))
        aside = torch.linalg.qr(torch.cat((codes.own.T, torch.randn(width, width - _CODE, generator=generator)), 1))[0]
        places = torch.split(aside[:, _CODE:].T, [part.shape[1] for part in parts])
        usual = float(own[0].square().mean().sqrt())
        fc = usual * _of_size_one(ridge(taps, own[0], _RIDGE), taps) @ codes.own
        fc = fc + torch.cat([_of_size_one(part, taps) for part in parts], 1) @ torch.cat(places)
        samples = rms_norm(taps @ fc, torch.ones(width), config.rms_eps)
        read = ridge(samples[evidence.rows], evidence.hidden - mean, _RIDGE)
        told_here = samples @ read
        main = torch.split(largest_directions(told_here, _SLICES * config.head_dim), config.head_dim, dim=1)
        scale = float(told_here.square().mean().sqrt())
        said = places[LOOK_BACK] / float((samples @ places[LOOK_BACK].T).square().mean().sqrt())
        slices = tuple(((read @ part).T, part / scale) for part in main)
        return cls(fc, samples, tuple(places[:LOOK_BACK]), said, slices, mean / scale)


class _Layer:
    """One layer's attention weights, by key/value head; queries of a group are alike."""

    def __init__(self, config: DrafterConfig, tensors: dict[str, Tensor], index: int):
        self._prefix, self._index = f"layers.{index}.self_attn.", index
        self._group, self.head_dim = config.num_heads // config.num_kv_heads, config.head_dim
        width = config.hidden_size
        self.queries = tensors[self._prefix + "q_proj.weight"].clone().view(-1, self._group, self.head_dim, width)
        self.keys, self.values = (
            tensors[f"{self._prefix}{part}_proj.weight"].clone().view(-1, self.head_dim, width) for part in "kv"
        )
        self.out = torch.zeros(width, config.num_kv_heads, self._group, self.head_dim)
        half = config.head_dim // 2
        slow = (config.rope_theta ** (-torch.arange(half) / half) <= _SLOW).nonzero().flatten()
        self._places = torch.cat((slow, slow + half))

    def look(self, head: int, key: Tensor, query: Tensor) -> None:
        """Give a head its match, given as weights of one key and one query."""
        self.keys[head], self.queries[head] = _MATCH_SIZE * key, _MATCH_SIZE * query

    def match(
        self, heads: Sequence[int], pairs: Sequence[tuple[Tensor, Tensor, float]], generator: torch.Generator
    ) -> None:
        """Match codes: (where the query reads one, where the key reads one, share of the pairs used)."""
        query, key = torch.zeros_like(self.keys[0]), torch.zeros_like(self.keys[0])
        places = self._places[torch.randperm(len(self._places), generator=generator)]
        for asked, offered, share in pairs:
            count = min(int(share * len(self._places)), _KEY_CODE)
            mix = torch.linalg.qr(torch.randn(_KEY_CODE, _KEY_CODE, generator=generator))[0][:count]
            here, places = places[:count], places[count:]
            query[here], key[here] = mix @ asked[:_KEY_CODE], mix @ offered
        for head in heads:
            self.look(head, key, query)

    def carry(self, head: int, read: Float[Tensor, "n D"], write: Float[Tensor, "D n"]) -> None:
        """What a head reads where it looks, and where it writes that."""
        count = read.shape[0]
        self.values[head] = 0.0
        self.values[head, :count] = read
        self.out[:, head, :, :count] = write[:, None] / self._group

    def tensors(self) -> dict[str, Tensor]:
        gain = torch.full((self.head_dim,), _GAINS[self._index])
        parts = {"q": self.queries.flatten(0, 2), "k": self.keys.flatten(0, 1), "v": self.values.flatten(0, 1)}
        parts["o"] = self.out.flatten(1)
        found = {f"{self._prefix}{part}_proj.weight": weight for part, weight in parts.items()}
        return found | {f"{self._prefix}{part}_norm.weight": gain.clone() for part in "qk"}


def _first_layer(
    config: DrafterConfig,
    layer: _Layer,
    codes: _Codes,
    context: _Context,
    steady: tuple[Tensor, Tensor],
    loudness: Float[Tensor, " D"],
    size: float,
    generator: torch.Generator,
) -> None:
    distances = usual_distances(config.num_kv_heads)
    for head, distance in enumerate(distances):
        key, query = constant_pair(config, distance)
        layer.look(head, key[:, None] * steady[0], query[:, None] * steady[1])
    for head, carrier in enumerate(codes.carriers):  # the usual distances begin with 1 and 2
        layer.carry(head, codes.own[:_KEY_CODE], _CARRIED * size * carrier.T)
    mean = codes.without_carried((_SAID * size * context.mean / loudness)[:, None])
    layer.carry(len(codes.carriers), steady[0][None], mean)
    for head in range(len(distances), config.num_kv_heads):
        layer.match([head], [(codes.own, context.keys[1], 1.0)], generator)
        layer.carry(head, context.said, _SAID * size * codes.said.T / loudness[:, None])


def _second_layer(
    layer: _Layer,
    codes: _Codes,
    context: _Context,
    loudness: Float[Tensor, " D"],
    size: float,
    generator: torch.Generator,
) -> None:
    last, before = codes.own, codes.carriers
    there, one_back, two_back = context.keys
    whole = [(last, there, 0.4), (before[0], one_back, 0.35), (before[1], two_back, 0.25)]
    layer.match(range(_SLICES), whole, generator)
    for head, (read, write) in enumerate(context.slices):
        layer.carry(head, read, codes.without_carried(_SAID * size * write / loudness[:, None]))
    saying = [[(last, one_back, 0.6), (before[0], two_back, 0.4)]] * 2 + [[(before[0], two_back, 1.0)]]
    for head, pairs in enumerate(saying, start=_SLICES):
        layer.match([head], pairs, generator)
        layer.carry(head, context.said, _SAID * size * codes.said.T / loudness[:, None])


def largest_directions(values: Float[Tensor, "N D"], count: int) -> Float[Tensor, "D count"]:
    """Orthonormal directions in which the values vary most, largest first."""
    return torch.linalg.eigh(torch.cov(values.T))[1].flip(1)[:, :count]


def _of_size_one(weights: Float[Tensor, "n m"], inputs: Float[Tensor, "N n"]) -> Float[Tensor, "n m"]:
    return weights / (inputs @ weights).square().mean().sqrt()
