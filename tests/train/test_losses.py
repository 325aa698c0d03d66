"""The loss against slow float64 loops, reduced vocabulary and pieces included."""

import math

import pytest
import torch

from dspark.train import denominators, loss_sums, losses, slot_weights, total_loss
from dspark.train.losses import OUTSIDE

V, SLOTS = 11, 9


def make_case(draft_ids, seed=0):
    """Draft logits, full target distributions, full labels, weights, confidence logits; float64."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(SLOTS, len(draft_ids), generator=g, dtype=torch.float64)
    full = (2 * torch.randn(SLOTS, V, generator=g, dtype=torch.float64)).softmax(-1)
    labels = torch.randint(0, V, (SLOTS,), generator=g)
    mask = torch.ones(3, 3, dtype=torch.bool)
    weights = slot_weights(mask, decay=4.0).flatten().double()
    confidence = torch.randn(SLOTS, generator=g, dtype=torch.float64)
    return logits, full, labels, weights, confidence


def slow_loss(logits, full, labels, weights, confidence, draft_ids):
    """One formula per line, over the whole vocabulary."""
    ce_sum = ce_weight = l1_sum = bce_sum = weight_sum = 0.0
    for n in range(SLOTS):
        total = sum(math.exp(x) for x in logits[n].tolist())
        q = dict.fromkeys(range(V), 0.0)
        q |= {token: math.exp(x) / total for token, x in zip(draft_ids, logits[n].tolist(), strict=True)}
        w, label = float(weights[n]), int(labels[n])
        if label in draft_ids:
            ce_sum += w * -math.log(q[label])
            ce_weight += w
        distance = sum(abs(q[v] - float(full[n, v])) for v in range(V))
        l1_sum += w * distance
        c, survives = 1 / (1 + math.exp(-float(confidence[n]))), 1 - distance / 2
        bce_sum += w * -(survives * math.log(c) + (1 - survives) * math.log(1 - c))
        weight_sum += w
    return 0.1 * ce_sum / ce_weight + 0.9 * l1_sum / weight_sum + 1.0 * bce_sum / weight_sum


def draft_labels(labels, draft_ids):
    return torch.tensor([draft_ids.index(t) if t in draft_ids else OUTSIDE for t in labels.tolist()])


@pytest.mark.parametrize("draft_ids", [list(range(V)), [0, 2, 3, 7, 8, 10], [5]], ids=["full", "reduced", "one"])
def test_it_is_the_formula(draft_ids):
    logits, full, labels, weights, confidence = make_case(draft_ids, seed=4)
    if not set(labels.tolist()) & set(draft_ids):
        labels[0] = draft_ids[0]
    own = draft_labels(labels, draft_ids)
    sums = loss_sums(logits, full[:, draft_ids], own, weights, [confidence])
    expected = slow_loss(logits, full, labels, weights, confidence, draft_ids)
    assert float(total_loss(sums, denominators(weights, own))) == pytest.approx(expected, rel=1e-9)


def test_normalising_over_the_draft_vocabulary_would_be_noticed():
    draft_ids = [0, 2, 3, 7, 8, 10]
    logits, full, labels, weights, confidence = make_case(draft_ids)
    own, part = draft_labels(labels, draft_ids), full[:, draft_ids]
    right = loss_sums(logits, part, own, weights)
    wrong = loss_sums(logits, part / part.sum(-1, keepdim=True), own, weights)
    assert abs(float(right.l1 - wrong.l1)) > 0.1


def plain_sums(logits, probs, labels, weights):
    """CE and L1 sums as autograd sees them, in one piece."""
    log_q = logits.log_softmax(-1)
    own = log_q.gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
    ce = torch.where(labels != OUTSIDE, -own, torch.zeros_like(own))
    l1 = (log_q.exp() - probs).abs().sum(-1) + (1 - probs.sum(-1)).clamp(min=0)
    return (weights * ce).sum(), (weights * l1).sum()


@pytest.mark.parametrize("piece", [1, 13, 1000])
def test_the_written_out_gradient_is_autograds(piece, monkeypatch):
    monkeypatch.setattr(losses, "_PIECE_ELEMENTS", piece)
    draft_ids = [0, 2, 3, 7, 8, 10]
    logits, full, labels, weights, _ = make_case(draft_ids, seed=2)
    own, probs = draft_labels(labels, draft_ids), full[:, draft_ids]
    assert OUTSIDE in own and (own != OUTSIDE).any()
    for pick in (0, 1):
        x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        sums = loss_sums(x, probs, own, weights)
        (sums.ce, sums.l1)[pick].backward()
        plain_sums(y, probs, own, weights)[pick].backward()
        torch.testing.assert_close(x.grad, y.grad)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[200.0, -200.0, 0.0], [-1e4, -1e4, 0.0]], requires_grad=True)
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.3, 0.3, 0.4]])
    sums = loss_sums(logits, probs, torch.tensor([1, 0]), torch.ones(2))
    (sums.ce + sums.l1).backward()
    torch.testing.assert_close(sums.ce, torch.tensor(400.0 + 1e4))
    assert logits.grad.isfinite().all()


def test_weights_fall_with_the_slot_and_masked_slots_weigh_nothing():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    weights = slot_weights(mask, decay=2.0)
    expected = torch.tensor([[1.0, math.exp(-0.5), math.exp(-1.0)], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("cuts", [(9,), (4, 5), (1, 1, 7), (3, 3, 3)])
def test_pieces_add_up_to_the_whole(cuts):
    draft_ids = [0, 2, 3, 7, 8, 10]
    logits, full, labels, weights, confidence = make_case(draft_ids)
    own, probs = draft_labels(labels, draft_ids), full[:, draft_ids]
    over = denominators(weights, own)

    def gradient(sizes):
        x, c = logits.clone().requires_grad_(), confidence.clone().requires_grad_()
        total = 0.0
        split = [t.split(list(sizes)) for t in (x, probs, own, weights, c)]
        for piece in zip(*split, strict=True):
            loss = total_loss(loss_sums(*piece[:4], [piece[4]]), over)
            loss.backward()
            total += float(loss.detach())
        return total, x.grad, c.grad

    whole, parts = gradient((9,)), gradient(cuts)
    assert parts[0] == pytest.approx(whole[0], rel=1e-12)
    torch.testing.assert_close(parts[1], whole[1])
    torch.testing.assert_close(parts[2], whole[2])


def test_averaging_pieces_separately_would_be_noticed():
    """The common mistake: each piece divides by its own weights."""
    logits, full, labels, weights, confidence = make_case(list(range(V)))
    weights = weights * torch.arange(1, SLOTS + 1)
    over = denominators(weights, labels)
    whole = float(total_loss(loss_sums(logits, full, labels, weights, [confidence]), over))
    mistaken = []
    for part in (slice(0, 4), slice(4, 9)):
        sums = loss_sums(logits[part], full[part], labels[part], weights[part], [confidence[part]])
        mistaken.append(float(total_loss(sums, denominators(weights[part], labels[part]))))
    assert abs(sum(mistaken) / 2 - whole) > 1e-3


def test_the_confidence_loss_does_not_move_the_draft():
    logits, full, labels, weights, confidence = make_case(list(range(V)))
    x, c = logits.clone().requires_grad_(), confidence.clone().requires_grad_()
    loss_sums(x, full, labels, weights, [c]).bce.backward()
    assert x.grad is None or not x.grad.any()
    assert c.grad.abs().min() > 0


def test_a_batch_without_a_label_in_the_draft_vocabulary_is_finite():
    logits, full, _, weights, confidence = make_case([0, 2])
    own = torch.full((SLOTS,), OUTSIDE)
    x = logits.clone().requires_grad_()
    loss = total_loss(loss_sums(x, full[:, [0, 2]], own, weights, [confidence]), denominators(weights, own))
    loss.backward()
    assert loss.isfinite() and x.grad.isfinite().all()
