"""The whole engine under a policy that reads confidences, rule `rejection`: answers follow the target (clause 4).

A draft's second confidence says which first token was drawn, and costs are such that one token never pays and two may:
a plan that looks ahead keeps the first token only where it is one of those the drafter is sure behind.
"""

from dataclasses import replace

import pytest
import torch

from dspark.config import Draft
from dspark.engine.proposer import Outlook
from dspark.engine.scheduler import Scheduler
from dspark.schedule import Offer
from dspark.schedule.calibration import Calibration, bucket_of
from tests.engine import machine as m
from tests.engine import support as s
from tests.engine.test_identity import CRITICAL, PROMPTS, chi_square, exact_probabilities
from tests.toy_models import VOCAB_SIZE

ALLOWED = [65, 66, 67, 68]
SURE = [66, 68]  # what follows these is stated to be kept
SAMPLES, TAUGHT = 1500, 60
# Milliseconds of a pass by its tokens. Two requests: both may have their first token, one of them its second.
COSTS = {1: [10.0, 18.4, 18.9], 2: [10.0, 10.0, 14.5, 18.5, 18.7, 25.0]}


class TellTale(s.StatelessProposer):
    """Draws two of four tokens by what usually follows the last one, and states at the second what the first was."""

    name, most, drafter_pass = "telltale", 2, True
    calibration = Calibration({}, {("rejection", bucket_of(1.0)): (0.8, 0.7)})

    def __init__(self, target):
        chances = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
        chances[:, ALLOWED] = (s.bigram_logits(target)[:, ALLOWED] / 2).softmax(-1)
        self._chances = chances

    def offers(self, row, outlook: Outlook):
        return (Offer(self.name, outlook.survival(self.name, self.most), True, confident=True),)

    def propose(self, rows, lens, streams):
        make = torch.Generator().manual_seed(hash((streams.keys, streams.positions)) % 2**62)
        last, ids, probs = torch.tensor([row.request.tokens(row.request.num_tokens - 1)[0] for row in rows]), [], []
        for _ in range(2):
            probs.append(self._chances[last])
            last = torch.multinomial(probs[-1], 1, generator=make)[:, 0]
            ids.append(last)
        sure = torch.isin(ids[0], torch.tensor(SURE)).float()
        confidence = torch.stack((torch.full_like(sure, 0.8), 0.01 + 0.9 * sure), 1)
        return Draft(torch.stack(ids, 1), tuple(lens), torch.stack(probs, 1), confidence, (self.name,) * len(rows))


def frequencies(target, rows: int, policy: str, monkeypatch) -> tuple[torch.Tensor, set[int]]:
    """Counts [4, 4, 4] of the first three tokens of many answers, and the numbers of draft tokens verified."""
    machine = m.Machine(lambda tokens: COSTS[rows][min(tokens, len(COSTS[rows])) - 1])
    m.Clock(monkeypatch, target, machine)
    settings = {"max_batch": rows, "acceptance": "rejection", "guard": False}
    engine = m.engine_on(target, TellTale(target), machine, policy=policy, **settings)
    params = [s.seeded(i, max_tokens=4, allowed_token_ids=ALLOWED) for i in range(SAMPLES)]
    for some in params[:TAUGHT]:  # what drafts are worth is known before the first plan
        engine.add(PROMPTS[0], some, policy="fixed:2")
    while engine.num_requests:
        engine.step()
    verified = set()
    engine.listeners.append(lambda record: verified.update(row.verified for row in record.rows if row.drafted == 2))
    counts = torch.zeros(4, 4, 4)
    for first in range(0, SAMPLES, rows):  # so that both of two requests have room for two tokens at once
        for output in engine.generate([PROMPTS[0]] * rows, params[first : first + rows]):
            counts[tuple(ALLOWED.index(token) for token in output.token_ids[:3])] += 1
    return counts, verified


def too_sure(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Standard deviations by which too many second tokens are of those that drafts are sure behind."""
    sure = torch.isin(torch.tensor(ALLOWED), torch.tensor(SURE))
    share, total = float(probs[:, sure].sum()), float(counts.sum())
    return (float(counts[:, sure].sum()) - share * total) / (total * share * (1 - share)) ** 0.5


@pytest.mark.parametrize("policy", ["scheduled", "threshold:0.5"])
@pytest.mark.parametrize("rows", [1, 2])
def test_answers_follow_the_target(rows, policy, target, monkeypatch):
    counts, verified = frequencies(target, rows, policy, monkeypatch)
    assert len(verified) > 1  # confidences do decide
    probs = exact_probabilities(target)
    assert chi_square(counts, probs) < CRITICAL and abs(too_sure(counts, probs)) < 4


@pytest.mark.parametrize("rows", [1, 2])
def test_an_engine_that_looks_ahead_is_found_out(rows, target, monkeypatch):
    view = Scheduler._row_view
    monkeypatch.setattr(Scheduler, "_row_view", lambda *args: replace(view(*args), free=True))
    counts, _ = frequencies(target, rows, "scheduled", monkeypatch)
    assert too_sure(counts, exact_probabilities(target)) > 4
