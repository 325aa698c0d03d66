"""Exact mode on CPU: a token's bits depend on its own request's tokens alone (clause 7)."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.target import PassRow, Target, load_target
from tests.toy_models import VOCAB_SIZE, write_model

CPU = torch.device("cpu")
SHAPES = ["llama", "llama-mha-bias", "qwen3"]
LENGTH = 200


@pytest.fixture(
    scope="module", params=[(s, d) for s in SHAPES for d in ("float16", "float32")] + [("qwen3", "float64")]
)
def toy(request, tmp_path_factory) -> Target:
    shape, dtype = request.param
    folder = write_model(tmp_path_factory.mktemp(shape), shape)
    return load_target(str(folder), CPU, dtype, exact=True)


def tokens(count: int, seed: int, vocab: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(target: Target, ids: torch.Tensor, cuts: Sequence[int], mates: Sequence[int] = (), place: int = 0):
    """Logits of every token of `ids`, run in passes that end at `cuts`.

    Each pass is shared with a prefill chunk for every entry of `mates`, that many tokens long; `place` of them come
    before our row.
    """
    pool = target.decoder.new_pool(512 * (len(mates) + 1))
    logits, begin = [], 0
    for step, end in enumerate([*cuts, len(ids)]):
        parts = [tokens(n, 100 + step) for n in mates]
        rows = [PassRow(512 * (i + 1), 0, n) for i, n in enumerate(mates)]
        parts.insert(place, ids[begin:end])
        rows.insert(place, PassRow(0, begin, end - begin))
        first = sum(mates[:place])
        hidden, _ = target.decoder.run(torch.cat(parts), rows, pool)
        logits.append(target.decoder.logits(hidden)[first : first + end - begin])
        begin = end
    return torch.cat(logits)


def one_by_one(begin: int) -> list[int]:
    return list(range(begin, LENGTH))


def test_decoding_gives_the_bits_of_prefill(toy):
    ids = tokens(LENGTH, 1)
    whole = run(toy, ids, [])
    assert torch.equal(run(toy, ids, one_by_one(120)), whole)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(1, LENGTH - 1), max_size=12, unique=True).map(sorted),
    mates=st.lists(st.sampled_from([1, 2, 6, 9, 30]), max_size=3),
    place=st.integers(0, 3),
)
def test_bits_do_not_depend_on_chunks_nor_on_the_rows_beside(toy, cuts, mates, place):
    ids = tokens(LENGTH, 2)
    alone = run(toy, ids, [])
    assert torch.equal(run(toy, ids, cuts, mates, min(place, len(mates))), alone)


def test_fast_mode_fails_the_same_check(tmp_path):
    """The wrong variant: without padding, single tokens take other kernels."""
    target = load_target(str(write_model(tmp_path / "toy")), CPU, "float32", exact=False)
    ids = tokens(LENGTH, 1)
    assert not torch.equal(run(target, ids, one_by_one(120)), run(target, ids, []))


@pytest.mark.real
def test_real_model_bits_do_not_depend_on_chunks_nor_on_the_rows_beside(smollm2_exact):
    ids = tokens(140, 3, smollm2_exact.spec.vocab_size)
    alone = run(smollm2_exact, ids, [])
    assert torch.equal(run(smollm2_exact, ids, [100, 101, 102, 107, 112, 127, 128, 132]), alone)
    assert torch.equal(run(smollm2_exact, ids, [64, 130], mates=[1, 9, 40], place=2), alone)


@pytest.mark.real
def test_activations_scaled_by_the_whole_call_fail_the_same_check(smollm2_exact, monkeypatch):
    """The wrong variant: dynamic quantisation with one scale for all rows ties a token to its batch mates."""
    head = smollm2_exact.decoder.head

    def quantised(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().max() / 127
        return head((x / scale).round() * scale)

    monkeypatch.setattr(smollm2_exact.decoder, "head", quantised)
    ids = tokens(140, 3, smollm2_exact.spec.vocab_size)
    assert not torch.equal(
        run(smollm2_exact, ids, [100, 101, 102, 107, 112, 127, 128, 132]), run(smollm2_exact, ids, [])
    )
