"""Results that nobody measured, to try reports on. Speeds are given; the rest follows by rule."""

import random
from collections.abc import Mapping, Sequence

from dspark.measure.bench.control import control_summary
from dspark.measure.bench.metrics import reliability
from dspark.measure.bench.records import (
    CONTROL,
    PLAIN,
    BenchResult,
    Cell,
    Group,
    Machine,
    ModelSize,
    Parting,
    Peaks,
    Proof,
    RequestRecord,
    Settings,
    StepCounts,
)
from dspark.measure.bench.summary import summarise

PLAIN_SPEED = 25.0  # tok/s of one request at a time
FACTORS = {PLAIN: 1.0, CONTROL: 1.0, "lookup": 1.4, "small model": 0.7, "transformers": 0.5}
GROUPS = (Group("code", 0.0, 1), Group("chat", 0.0, 1))
_PEAKS, _SIZE = Peaks(20e9, 100e9), ModelSize(270_000_000, 212_000_000, 46_080, 56_000_000)
_SLOTS = (0.7, 0.6, 0.55, 0.5)  # conditional acceptance


def made_up(
    factors: Mapping[str, float] = FACTORS,
    groups: Sequence[Group] = GROUPS,
    rounds: int = 5,
    jitter: float = 0.005,
    seed: int = 0,
    **changed: object,
) -> BenchResult:
    """A whole run: `factors` are speeds over plain's, and each round of each cell is off by up to `jitter`. `changed`
    replaces fields of the result."""
    chance = random.Random(seed)
    cells = []
    for number in range(rounds):
        for group in groups:
            for mode, factor in factors.items():
                off = 1 + chance.uniform(-jitter, jitter)
                cells.append(_cell(mode, group, number, PLAIN_SPEED * factor * off * group.concurrency**0.6))
    proofs = tuple(_proof(mode, group) for mode in factors if mode != PLAIN for group in groups)
    values: dict[str, object] = {
        "settings": Settings(
            "toy", tuple(factors), tuple(dict.fromkeys(g.kind for g in groups)), (0.0,), (1,), (0,), rounds=rounds
        ),
        "machine": Machine("Made-up CPU", 2, 2, 8_000_000_000, "cpu", {"torch": "1.2.3"}, 0.1, 1.2, _PEAKS),
        "target_name": "Toy-1M",
        "model": _SIZE,
        "version": "0.0",
        "command": "dspark bench --target toy",
        "started": "2026-01-02T03:04:05Z",
        "seconds": 12.0,
        "complete": True,
        "cells": tuple(cells),
        "rows": summarise(cells, proofs, _SIZE, _PEAKS),
        "control": control_summary(cells),
        "proofs": proofs,
        "reliability": reliability("small model", _counts(400, 1.0, True)),
    }  # fmt: skip
    return BenchResult(**{**values, **changed})  # type: ignore[arg-type]


def _proof(mode: str, group: Group) -> Proof:
    """The other engine parts from plain once in four answers."""
    if mode == "transformers":
        return Proof(mode, group, False, 4, 3, (Parting(2, 17, 0.5, 0.001, False),))
    return Proof(mode, group, True, 4, 4)


def _cell(mode: str, group: Group, number: int, speed: float) -> Cell:
    own = speed / group.concurrency
    requests = tuple(
        RequestRecord(n, max(group.depth, 30), 100, 0.1 + (n + 1) * 50 / own, 0.1, (1e3 / own,) * 3, "length", "abc")
        for n in range(4)
    )
    counts = None if mode == "transformers" else _counts(400, 1000 / speed, mode not in (PLAIN, CONTROL))
    return Cell(mode, group, number, 400 / speed, requests, counts, 1_200_000_000)


def _counts(tokens: int, token_ms: float, drafts: bool) -> StepCounts:
    """Of so many tokens, with the acceptance of `_SLOTS` in every step when there are drafts."""
    if not drafts:
        return StepCounts(
            tokens, 0, 0, 0, 0, tokens, 0, (), (), (), (), (), {"none": tokens}, tokens + 4, tokens + 120,
            tokens * 80, 0.0, token_ms * tokens * 0.9, token_ms * tokens * 0.05, token_ms * tokens * 0.05, tokens,
        )  # fmt: skip
    steps = tokens // 2
    kept = [steps]
    for share in _SLOTS:
        kept.append(round(kept[-1] * share))
    histogram = tuple(a - b for a, b in zip(kept, [*kept[1:], 0], strict=True))
    accepted = sum(kept[1:])
    return StepCounts(
        steps, steps, 4 * steps, 4 * steps, accepted, accepted + steps, 0, (steps,) * 4, (steps,) * 4, tuple(kept[:-1]),
        tuple(kept[1:]), histogram, {"lookup": steps}, steps + 4, 5 * steps + 120, steps * 80,
        token_ms * tokens * 0.1, token_ms * tokens * 0.8, token_ms * tokens * 0.05, token_ms * tokens * 0.05, tokens,
        (10, 0, 20), (0.5, 0.0, 5.0), (1, 0, 4),
    )  # fmt: skip
