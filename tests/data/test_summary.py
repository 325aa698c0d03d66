"""Figures of a corpus that were counted by hand."""

import torch

from dspark.data import Corpus, summarise
from dspark.data.summary import COVERED


def corpus(sequences, prompt_lens, temperatures, kinds):
    offsets = (0, *torch.tensor([len(s) for s in sequences]).cumsum(0).tolist())
    ids = torch.tensor([i for s in sequences for i in s])
    return Corpus(ids, offsets, tuple(prompt_lens), tuple(temperatures), tuple(kinds))


def test_groups_are_kinds_and_temperatures_and_the_last_is_all():
    loop = [7, 8] * 40
    sequences = [[1, 2, 3, 4], [1, 2, 5], [1, 9, *loop], [1, 2, 3]]
    groups = summarise(corpus(sequences, [2, 2, 2, 2], [0.0, 1.0, 0.0, 0.0], ["math", "math", "chat", "math"]))
    assert [(g.kind, g.temperature, g.sequences) for g in groups] == [
        ("chat", 0.0, 1),
        ("math", 0.0, 2),
        ("math", 1.0, 1),
        (None, None, 4),
    ]
    chat, math, warm, everything = groups
    assert (chat.looping, math.looping, everything.looping) == (1.0, 0.0, 0.25)
    assert (math.prompt_tokens, math.response_tokens, math.mean_response) == (4, 3, 1.5)
    assert abs(math.p90_response - 1.9) < 1e-9
    assert (math.repeated_prompts, warm.repeated_prompts, chat.repeated_prompts) == (1, 1, 0)
    assert everything.response_tokens == 84 and everything.covered == 1.0


def test_coverage_is_the_share_of_frequent_tokens():
    frequent, rare = list(range(COVERED)) * 2, list(range(COVERED, COVERED + 100))
    groups = summarise(corpus([[0, *frequent], [0, *rare]], [1, 1], [0.0, 1.0], ["a", "a"]))
    assert [g.covered for g in groups] == [1.0, 0.0, 2 * COVERED / (2 * COVERED + 100)]
