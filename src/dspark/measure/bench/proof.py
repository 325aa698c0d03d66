"""Whether modes say what plain says: hashes compared, differences looked into."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dspark.measure.bench.drive import Ask
from dspark.measure.bench.records import PLAIN, Group, Parting, Proof
from dspark.measure.bench.runner import Done
from dspark.measure.bench.workload import Workload
from dspark.measure.ties import differences
from dspark.target import Target

MOST_SCORED = {True: 20, False: 3}  # differences whose logit gap is computed, by whether equality is promised

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A mode's answers beside plain's: how many requests were compared, and those that differ in some round."""

    mode: str
    group: Group
    compared: int
    different: tuple[
        tuple[int, Ids, Ids], ...
    ]  # number of the request, plain's ids, the mode's in the first such round


def compare(done: Sequence[Done]) -> Iterator[Comparison]:
    """Every mode of every group with plain's first round, request by request; plain's later rounds too."""
    reference = {d.cell.group: d for d in reversed(done) if d.cell.mode == PLAIN}
    grouped: dict[tuple[str, Group], list[Done]] = {}
    for each in done:
        if each is not reference.get(each.cell.group) and each.cell.group in reference:
            grouped.setdefault((each.cell.mode, each.cell.group), []).append(each)
    for (mode, group), several in grouped.items():
        different: dict[int, tuple[Ids, Ids]] = {}
        compared: set[int] = set()
        for each in several:
            for number, (expected, got) in enumerate(zip(reference[group].token_ids, each.token_ids, strict=False)):
                if expected is None or got is None:
                    continue
                compared.add(number)
                if expected != got:
                    different.setdefault(number, (expected, got))
        yield Comparison(mode, group, len(compared), tuple((n, *pair) for n, pair in sorted(different.items())))


def prove(
    done: Sequence[Done], promises: Mapping[str, bool], target: Target, workload: Workload, coupled: bool
) -> tuple[Proof, ...]:
    """What `compare` finds, with the logit gap of the differences.

    `promises`: by mode, whether greedy and seeded answers are plain's; seeded ones are when the rule is `coupled`.
    Where sampling uses another engine's randomness there is nothing to compare.
    """
    proofs = []
    for found in compare(done):
        sampled = found.group.temperature > 0
        expected = promises.get(found.mode, False) and (coupled or not sampled)
        if sampled and not expected:
            continue
        asks = workload.asks(found.group)
        numbers = {number for number, _, _ in found.different}
        wanted = {number: next(asks) for number in range(max(numbers, default=-1) + 1)}
        partings = [
            _parting(target, wanted[number], expected_ids, got, scored=place < MOST_SCORED[expected])
            for place, (number, expected_ids, got) in enumerate(found.different)
        ]
        equal = found.compared - len(partings)
        proofs.append(Proof(found.mode, found.group, expected, found.compared, equal, tuple(partings)))
    return tuple(proofs)


def _parting(target: Target, ask: Ask, expected: Ids, got: Ids, scored: bool) -> Parting:
    position = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
    if position is None or not scored:
        place = min(len(expected), len(got)) if position is None else position
        return Parting(ask.prompt, place, None, None, tie=False)
    (found,) = differences(target, [ask.ids], [expected], [got], ask.params)
    return Parting(ask.prompt, found.position, round(found.gap, 6), round(found.noise, 6), found.is_tie)
