"""Whatever drafts, the text is plain decoding's: bit for bit in exact mode (clauses 2, 3 and 7)."""

import pytest
import torch

from dspark.config import Draft
from dspark.engine.lookup import LookupProposer
from tests.engine import support as s
from tests.toy_models import VOCAB_SIZE

PROMPTS = s.prompts(6)
MODES = {
    "greedy": s.greedy(),
    "seeded": s.seeded(),
    "seeded, warped": s.seeded(7, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01),
    "penalties": s.greedy(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, min_tokens=9),
    "seeded, bias": s.seeded(3, logit_bias={70: 1.0, 72: -1.0}, allowed_token_ids=range(66, 74)),
}


@pytest.fixture(scope="module")
def plain(target):
    """Every mode's answers without drafts, one request at a time."""
    engine = s.toy_engine(target)
    return {name: [engine.generate([p], params)[0] for p in PROMPTS] for name, params in MODES.items()}


def make_proposer(kind, target, answers, tmp_path):
    return {
        "none": lambda: s.NoneProposer(),
        "lookup": lambda: LookupProposer(),
        "model": lambda: s.model_proposer(target, tmp_path / "model"),
        "dspark, sometimes right": lambda: s.bigram_proposer(target),
        "dspark, random weights": lambda: s.random_proposer(target),
        "dspark, few tokens": lambda: s.random_proposer(target, draft_vocab_size=100),
        "sometimes right": lambda: s.ScriptedProposer(answers, error=s.coin(1, 0.4)),
        "always right": lambda: s.ScriptedProposer(answers),
        "always wrong": lambda: s.ScriptedProposer(answers, error=lambda position: True),
        "random length": lambda: s.ScriptedProposer(answers, s.coin(2, 0.3), lambda position: position * 7 % 6),
    }[kind]()


KINDS = [
    "none",
    "lookup",
    "model",
    "dspark, sometimes right",
    "dspark, random weights",
    "dspark, few tokens",
    "sometimes right",
    "always right",
    "always wrong",
    "random length",
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_plain_decoding(kind, mode, target, plain, tmp_path):
    answers = plain[mode]
    proposer = make_proposer(kind, target, answers, tmp_path)
    engine = s.toy_engine(target, proposer, policy="fixed:6", max_batch=4, max_pass_tokens=64)
    together = engine.generate(PROMPTS, MODES[mode])
    assert [o.token_ids for o in together] == [a.token_ids for a in answers]
    assert [o.text for o in together] == [a.text for a in answers]
    if kind != "none" and (kind != "lookup" or mode in ("greedy", "seeded, bias")):
        assert sum(o.stats.drafted for o in together) > 0


@pytest.mark.parametrize("policy", ["fixed:1", "fixed:3", "fixed:16"])
def test_text_does_not_depend_on_the_draft_length(policy, target, plain):
    for mode in ("greedy", "seeded"):
        engine = s.toy_engine(target, s.bigram_proposer(target, block_size=16), policy=policy)
        assert [o.token_ids for o in engine.generate(PROMPTS, MODES[mode])] == [a.token_ids for a in plain[mode]]


def acceptance(outputs) -> list[float]:
    """Conditional acceptance of the first four slots."""
    verified = [sum(o.stats.slot_verified[k] for o in outputs if k < len(o.stats.slot_verified)) for k in range(4)]
    accepted = [sum(o.stats.slot_accepted[k] for o in outputs if k < len(o.stats.slot_accepted)) for k in range(4)]
    return [a / b for a, b in zip(accepted, [verified[0], *accepted[:3]], strict=True)]


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
def test_the_toy_drafter_is_right_and_wrong_at_every_slot(mode, target):
    """Otherwise the identities above would prove little."""
    params = s.greedy(max_tokens=80) if mode == "greedy" else s.seeded(1, temperature=0.7, max_tokens=80)
    outputs = s.toy_engine(target, s.bigram_proposer(target), policy="fixed:4").generate(s.prompts(24), params)
    assert all(0.3 <= rate <= 0.8 for rate in acceptance(outputs)), acceptance(outputs)


def test_seed_alone_decides_the_text_in_any_batch(target):
    params = [s.seeded(i) for i in range(6)]
    together = s.toy_engine(target, s.bigram_proposer(target)).generate([PROMPTS[0]] * 6, params)
    alone = [s.toy_engine(target).generate([PROMPTS[0]], p)[0] for p in params]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]
    assert len({o.token_ids for o in together}) == 6


class NoiseBySlot(s.StatelessProposer):
    """Wrong on purpose: claims the distribution it drew from is another one."""

    name = "lying"

    def propose(self, rows, lens, streams):
        probs = torch.full((len(rows), 1, VOCAB_SIZE), 1e-4)
        probs[:, :, 65] = 1.0
        ids = torch.full((len(rows), 1), 66)
        return Draft(ids, tuple(min(n, 1) for n in lens), probs)


def frequencies(target, proposer, samples: int = 1500) -> torch.Tensor:
    """Counts [4, 4, 4] of three tokens over many runs of rule `rejection`, among four allowed tokens."""
    allowed = [65, 66, 67, 68]
    params = [s.seeded(i, max_tokens=3, allowed_token_ids=allowed) for i in range(samples)]
    settings = {"policy": "fixed:2", "max_batch": 256, "max_pass_tokens": 512, "kv_gb": 0.2}
    engine = s.toy_engine(target, proposer, acceptance="rejection", **settings)
    outputs = engine.generate([PROMPTS[0]] * samples, params)
    counts = torch.zeros(4, 4, 4)
    for output in outputs:
        counts[tuple(allowed.index(t) for t in output.token_ids)] += 1
    return counts


@torch.no_grad()
def exact_probabilities(target) -> torch.Tensor:
    """[4, 4, 4]: the target's own probability of every answer."""
    allowed, result = [65, 66, 67, 68], torch.zeros(4, 4, 4)
    pool = target.decoder.new_pool(256)
    for i, a in enumerate(allowed):
        for j, b in enumerate(allowed):
            ids = torch.tensor([*PROMPTS[0], a, b])
            hidden, _ = target.decoder.run(ids, [s.PassRow(0, 0, len(ids))], pool)
            p = target.decoder.logits(hidden[-3:])[:, allowed].softmax(-1)
            result[i, j] = p[0, i] * p[1, j] * p[2]
    return result


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Over the answers expected at least five times, and all others as one."""
    counts, expected = counts.flatten(), probs.flatten() * counts.sum()
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    assert len(expected) > 20
    return float(((counts - expected) ** 2 / expected).sum())


CRITICAL = 62.0  # chi-square with 26 degrees of freedom, p = 0.0001


@pytest.mark.parametrize("kind", ["none", "lookup", "model", "dspark, sometimes right", "dspark, few tokens"])
def test_rejection_sampling_follows_the_target(kind, target, tmp_path):
    proposer = make_proposer(kind, target, [], tmp_path)
    assert chi_square(frequencies(target, proposer), exact_probabilities(target)) < CRITICAL


def test_a_drafter_that_misstates_its_distribution_is_found_out(target):
    """The wrong variant: the same check fails when q is not what the token was drawn from."""
    assert chi_square(frequencies(target, NoiseBySlot()), exact_probabilities(target)) > CRITICAL
