"""Logits equal transformers' on the same weights, however a text is cut into passes."""

import pytest
import torch

from dspark.target import PassRow, load_target
from tests.toy_models import SHAPES, VOCAB_SIZE, write_model

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-4
LENGTH = 150  # over one key block


@pytest.fixture(scope="module", params=list(SHAPES))
def pair(request, tmp_path_factory):
    """Our target and transformers' model from one folder, in float32."""
    folder = write_model(tmp_path_factory.mktemp(request.param), request.param)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return load_target(str(folder), torch.device("cpu"), "float32"), theirs


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def run_in_passes(target, ids, cuts):
    """All logits, computed in passes that end at `cuts`; the last pass ends with the ids."""
    pool, logits, begin = target.decoder.new_pool(512), [], 0
    for end in [*cuts, len(ids)]:
        hidden, _ = target.decoder.run(ids[begin:end], [PassRow(128, begin, end - begin)], pool)
        logits.append(target.decoder.logits(hidden))
        begin = end
    return torch.cat(logits)


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param([], id="prefill"),
        pytest.param([1, 64, 131], id="chunked prefill"),
        pytest.param(list(range(140, LENGTH)), id="decode"),
        pytest.param([120, 125, 130, 136], id="multi-token verify"),
    ],
)
@torch.no_grad()
def test_logits_equal_transformers(pair, ids, cuts):
    ours, theirs = pair
    expected = theirs(ids[None]).logits[0]
    assert (run_in_passes(ours, ids, cuts) - expected).abs().max() < TOLERANCE


@torch.no_grad()
def test_rows_of_one_pass_do_not_see_each_other(pair, ids):
    ours, theirs = pair
    parts = [ids[:40], ids[40:41], ids[41:100]]
    pool = ours.decoder.new_pool(1024)
    rows = [PassRow(start, 0, len(part)) for start, part in zip((0, 512, 128), parts, strict=True)]
    hidden, _ = ours.decoder.run(torch.cat(parts), rows, pool)
    expected = torch.cat([theirs(part[None]).logits[0] for part in parts])
    assert (ours.decoder.logits(hidden) - expected).abs().max() < TOLERANCE


@torch.no_grad()
def test_taps_are_the_layer_outputs(pair, ids):
    ours, theirs = pair
    hidden_states = theirs(ids[None], output_hidden_states=True).hidden_states
    _, taps = ours.decoder.run(ids, [PassRow(0, 0, len(ids))], ours.decoder.new_pool(512), taps=(-1, 0, 1))
    expected = torch.cat([hidden_states[i + 1][0] for i in (-1, 0, 1)], dim=-1)
    assert taps.shape == (LENGTH, 3 * ours.spec.hidden_size)
    assert (taps - expected).abs().max() < TOLERANCE


@torch.no_grad()
def test_rolling_back_is_stating_a_shorter_length(pair, ids):
    """After running tokens that are then dropped, the cache gives what it gave without them."""
    ours, theirs = pair
    pool = ours.decoder.new_pool(512)
    ours.decoder.run(ids[:100], [PassRow(0, 0, 100)], pool)
    ours.decoder.run(ids[120:128], [PassRow(0, 100, 8)], pool)  # drafts that turn out wrong
    hidden, _ = ours.decoder.run(ids[100:], [PassRow(0, 100, LENGTH - 100)], pool)
    expected = theirs(ids[None]).logits[0, 100:]
    assert (ours.decoder.logits(hidden) - expected).abs().max() < TOLERANCE


def test_chat_template_equals_transformers(pair):
    ours, theirs = pair
    tokenizer = transformers.AutoTokenizer.from_pretrained(ours.folder)
    messages = [{"role": "system", "content": "Kurz."}, {"role": "user", "content": "Grüße, 世界 🙂!"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.tokenizer.render_chat(messages) == expected
    assert ours.tokenizer.encode(expected, add_special_tokens=False) == tokenizer.encode(
        expected, add_special_tokens=False
    )
