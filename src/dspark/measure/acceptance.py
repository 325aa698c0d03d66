"""How many tokens a step keeps, by set of prompts and decoding. Counts only, so any machine gives the same table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dspark.engine import Output, RequestStats
from dspark.measure.answers import Decoding, EngineFor, Ids, answers, seeded


@dataclass
class Acceptance:
    """Sums over the decoding steps of one set of prompts under one decoding; steps without a draft count too."""

    name: str
    decoding: Decoding
    prompts: int = 0
    steps: int = 0
    committed: int = 0
    slot_verified: list[int] = field(default_factory=list)
    slot_accepted: list[int] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)  # steps by where their draft came from

    @property
    def acceptance_length(self) -> float:
        """Committed tokens per decoding step, bonus and a final end token included."""
        return self.committed / self.steps if self.steps else 0.0

    @property
    def slot_survival(self) -> tuple[float, ...]:
        """Per slot, of the drafts that reached that far: share whose tokens up to it were all kept."""
        return tuple(a / v for a, v in zip(self.slot_accepted, self.slot_verified, strict=True))

    def add(self, counts: "RequestStats | Acceptance", prompts: int) -> None:
        self.prompts += prompts
        self.steps += counts.steps
        self.committed += counts.committed
        add_slots(self.slot_verified, counts.slot_verified)
        add_slots(self.slot_accepted, counts.slot_accepted)
        for source, steps in counts.sources.items():
            self.sources[source] = self.sources.get(source, 0) + steps


def add_slots(total: list[int], counts: Sequence[int]) -> None:
    """Add counts per slot to `total`, which grows where it is shorter."""
    total += [0] * (len(counts) - len(total))
    for slot, count in enumerate(counts):
        total[slot] += count


def measure_acceptance(
    engine_for: EngineFor,
    sets: Mapping[str, Sequence[Ids]],
    decodings: Sequence[Decoding],
    max_tokens: int,
    seed: int = 0,
) -> Iterator[Output | Acceptance]:
    """Answer every set under every decoding; yields outputs as they end and, after a set's last, its sums."""
    for decoding in decodings:
        engine = engine_for(decoding)
        for name, prompts in sets.items():
            total = Acceptance(name, decoding)
            for output in answers(engine, seeded(prompts, decoding.temperature, max_tokens, seed)):
                total.add(output.stats, prompts=1)
                yield output
            yield total


def mean_length(cells: Sequence[Acceptance], decoding: Decoding) -> float:
    """Mean over the sets, each counting the same."""
    lengths = [cell.acceptance_length for cell in cells if cell.decoding == decoding]
    return sum(lengths) / len(lengths)


def all_sets(cells: Sequence[Acceptance], decoding: Decoding) -> Acceptance:
    """The sums of all sets of one decoding."""
    total = Acceptance("all", decoding)
    for cell in cells:
        if cell.decoding == decoding:
            total.add(cell, cell.prompts)
    return total
