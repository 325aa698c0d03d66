"""SmolLM2-135M: the same text whatever drafts, bit for bit in exact mode; ties reported in fast mode."""

import pytest

from dspark.config import EngineConfig, SamplingParams
from dspark.engine import Engine
from dspark.engine.lookup import LookupProposer
from dspark.engine.model_proposer import ModelProposer
from dspark.engine.proposer import NoneProposer
from tests.engine.support import random_proposer

pytestmark = pytest.mark.real

QUESTIONS = [
    "Write a Python function that reverses a string.",
    "What is the capital of France, and why is it famous?",
    "Compute 12 * 13 step by step.",
    "Repeat this sentence twice: The quick brown fox jumps over the lazy dog.",
    "Translate 'good morning' into French, German and Spanish.",
    "List three uses of a paper clip.",
    "Write a haiku about the sea.",
    "Rename x to count in this code: x = 0\nwhile x < 10:\n    x = x + 1",
]


def engine_for(target, proposer, policy="fixed:4"):
    config = EngineConfig(kv_gb=0.5, policy=policy)
    return Engine(target, proposer, config)


@pytest.fixture(scope="module")
def plain(smollm2_exact):
    """Answers without drafts, one request at a time."""
    engine = engine_for(smollm2_exact, NoneProposer())
    prompts = [engine.chat_ids([{"role": "user", "content": q}]) for q in QUESTIONS]
    return prompts, {name: [engine.generate([p], params)[0] for p in prompts] for name, params in modes().items()}


def modes():
    return {
        "greedy": SamplingParams(temperature=0, max_tokens=48),
        "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24),
    }


def make(kind, target):
    return {
        "lookup": LookupProposer,
        "model": lambda: ModelProposer(target, target),
        "dspark, random weights": lambda: random_proposer(
            target, draft_vocab_size=8192, target_layer_ids=(8, 18, 28), mask_token_id=5, num_kv_heads=4
        ),
    }[kind]()


@pytest.mark.parametrize("kind", ["lookup", "model", "dspark, random weights"])
def test_exact_mode_gives_plain_text_bit_for_bit(kind, smollm2_exact, plain):
    """All together in one batch with drafts, against one by one without."""
    prompts, answers = plain
    for name, params in modes().items():
        outputs = engine_for(smollm2_exact, make(kind, smollm2_exact)).generate(prompts, params)
        assert [o.token_ids for o in outputs] == [a.token_ids for a in answers[name]]
        assert [o.text for o in outputs] == [a.text for a in answers[name]]


def test_lookup_drafts_are_accepted_where_text_repeats(smollm2_exact, plain):
    prompts, _ = plain
    output = engine_for(smollm2_exact, LookupProposer()).generate([prompts[3]], modes()["greedy"])[0]
    assert output.stats.acceptance_length > 1.3
