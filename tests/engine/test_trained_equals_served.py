"""Clause 10 of docs/exactness.md: a drafter that learned something accepts in the engine what rollouts say, cold or
with its prompt cached, whatever the batch and the size of prompt chunks; features or tokens out of place show at once.

The engine drafts at T = 0 on prompts of texts the same target wrote, so every whole block it drafts has its counterpart
in a rollout at the same place.
"""

from collections import defaultdict

import pytest
import torch

from dspark.config import EngineConfig, SamplingParams
from dspark.drafter import load_drafter
from dspark.drafter.heads import MarkovHead
from dspark.engine import Engine
from dspark.engine.dspark_proposer import DsparkProposer
from dspark.engine.proposer import NoneProposer
from dspark.target import load_target
from dspark.train import FeatureStore, roll_out
from tests.toy_models import VOCAB_SIZE
from tests.train.toys import BLOCK, CPU, make_corpus, toy_trainer, write_target

TEXTS, TOKENS = 6, 40
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
STEPS = 145
PROMPT = 20  # tokens, and a few more
# Passes of 512 take all prompts at once; 8 cuts each, and 40 those of a batch, with room for every row's draft.
COLD = [(1, 8, False), (1, 512, False), (8, 40, False), (8, 512, False)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(write_target(tmp_path_factory.mktemp("target"))), CPU, "float32", True)


@pytest.fixture(scope="module")
def corpus(target):
    make = torch.Generator().manual_seed(5)
    prompts = [torch.randint(32, 127, (PROMPT + i,), generator=make).tolist() for i in range(TEXTS)]
    engine = Engine(target, NoneProposer(), EngineConfig(model="toy", kv_gb=0.02))
    outputs = engine.generate(prompts, PARAMS)
    return make_corpus([p + list(o.token_ids) for p, o in zip(prompts, outputs, strict=True)], list(map(len, prompts)))


@pytest.fixture(scope="module")
def drafter(target, corpus, tmp_path_factory):
    """Trained until it is mostly right, and still wrong often enough for every slot to matter."""
    trainer = toy_trainer(target, corpus, steps=STEPS, lr=5e-3, rank=64, chunk_blocks=16)
    for _ in trainer.run():
        pass
    folder = tmp_path_factory.mktemp("drafter")
    trainer.save(folder)
    return load_drafter(folder, target.decoder, target.fingerprint)


def serve(target, drafter, corpus, batch, chunk, warm=False):
    """Blocks drafted whole, as accepted tokens by sequence and anchor; and the engine's prompts' first tokens."""
    config = EngineConfig(
        model="toy", kv_gb=0.02, policy=f"fixed:{BLOCK}", max_batch=batch, max_pass_tokens=chunk, prefix_cache=warm
    )
    engine = Engine(target, DsparkProposer(drafter), config)
    prompts = [corpus.sequence(i)[: corpus.prompt_lens[i]].tolist() for i in range(len(corpus))]
    if warm:
        engine.generate(prompts, PARAMS)
    steps = defaultdict(list)
    engine.listeners.append(lambda record: [steps[row.request_id].append(row) for row in record.rows])
    outputs = engine.generate(prompts, PARAMS)
    accepted = {}
    for i, output in enumerate(outputs):
        assert [*output.prompt_ids, *output.token_ids] == corpus.sequence(i).tolist()
        anchor = corpus.prompt_lens[i]
        for row in steps[output.request_id]:
            if not row.prefill:
                if row.verified == BLOCK and anchor + BLOCK < corpus.length(i):
                    accepted[i, anchor] = row.accepted
                anchor += row.committed
    return accepted


def offline(target, drafter, corpus, places):
    """Survival per slot of rollouts at these anchors."""
    anchors = defaultdict(list)
    for sequence, anchor in sorted(places):
        anchors[sequence].append(anchor)
    store = FeatureStore(target.decoder, drafter.config.target_layer_ids, corpus, 1e9)
    rollout = roll_out(drafter, store, corpus, anchors)
    assert rollout.blocks == len(places)
    return [s / rollout.blocks for s in rollout.survived]


def survival(accepted):
    return [sum(a >= k for a in accepted.values()) / len(accepted) for k in range(1, BLOCK + 1)]


def apart(served, rolled):
    """Largest difference over the slots, in points."""
    return 100 * max(abs(a - b) for a, b in zip(served, rolled, strict=True))


@pytest.mark.parametrize(("batch", "chunk", "warm"), [*COLD, (8, 40, True)])
def test_trained_is_served(target, corpus, drafter, batch, chunk, warm):
    accepted = serve(target, drafter, corpus, batch, chunk, warm)
    rolled = offline(target, drafter, corpus, accepted)
    assert len(accepted) > 50
    assert rolled[0] > 0.6 and 0.2 < rolled[-1] < 0.95  # it learned, and errs
    assert apart(survival(accepted), rolled) <= 2


def forget_earlier_chunks(monkeypatch):
    """Features of a prompt's earlier chunks never reach the drafter."""
    observe = DsparkProposer.observe

    def forgetful(self, row, taps, kept):
        cut_short = row.prefill and row.request.kv_len < len(row.request.prompt_ids)
        observe(self, row, torch.zeros_like(taps) if cut_short else taps, kept)

    monkeypatch.setattr(DsparkProposer, "observe", forgetful)


def features_of_a_neighbour(monkeypatch):
    """Taps are taken one position late."""
    observe = DsparkProposer.observe

    def late(self, row, taps, kept):
        observe(self, row, taps.roll(1, dims=0), kept)

    monkeypatch.setattr(DsparkProposer, "observe", late)


def previous_token_out_of_place(monkeypatch):
    """The sequential head sees the id after the one before."""
    embed = MarkovHead.embed

    def shifted(self, previous, like):
        return embed(self, (previous + 1) % VOCAB_SIZE, like)

    monkeypatch.setattr(MarkovHead, "embed", shifted)


@pytest.mark.parametrize("mistake", [features_of_a_neighbour, forget_earlier_chunks, previous_token_out_of_place])
def test_what_is_out_of_place_shows(target, corpus, drafter, monkeypatch, mistake):
    with monkeypatch.context() as patch:
        mistake(patch)
        accepted = serve(target, drafter, corpus, 1, 8)
    assert apart(survival(accepted), offline(target, drafter, corpus, accepted)) > 2
