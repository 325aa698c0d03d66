"""Short runs of the engine: how far drafts survive, and whether steps cost what the profile says."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median

from dspark.config import SamplingParams, StepRecord
from dspark.engine import Engine, Output
from dspark.engine.lookup import LookupProposer
from dspark.errors import DataError
from dspark.measure.plan import Survival
from dspark.measure.workloads import WORKLOADS
from dspark.schedule.profile import Profile

KINDS = ("code", "math", "chat")


@dataclass(frozen=True, slots=True)
class StepCheck:
    """Decoding steps of one size: median measured and predicted milliseconds."""

    tokens: int
    rows: int
    steps: int
    measured_ms: float
    predicted_ms: float

    @property
    def ratio(self) -> float:
        return self.predicted_ms / self.measured_ms


@dataclass(frozen=True, slots=True)
class Check:
    """Predicted against measured step times. `error`: median over steps of the relative error; `factor`: measured over
    predicted where everything is slower or faster alike; `shape_error`: what is left once that is taken out."""

    sizes: tuple[StepCheck, ...]
    steps: int
    error: float
    factor: float
    shape_error: float


def prompts_of(engine: Engine, kind: str, count: int, first: int = 0) -> list[list[int]]:
    """`count` prompts of a kind through the chat template, from the `first` on, in a circle."""
    texts = WORKLOADS[kind]
    chosen = [texts[(first + i) % len(texts)] for i in range(count)]
    return [engine.chat_ids([{"role": "user", "content": text}]) for text in chosen]


def decoding_steps(engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[StepRecord]:
    """Answer the prompts together; the steps in which every request decodes."""
    records: list[StepRecord] = []
    engine.listeners.append(records.append)
    try:
        engine.generate(prompts, params)
    finally:
        engine.listeners.remove(records.append)
    return [record for record in records if not any(row.prefill for row in record.rows)]


def check_profile(
    profile: Profile, records: Sequence[StepRecord], sampled: bool = False, drafter: str | None = None
) -> Check:
    """Compare what steps took with what the profile says they take; `drafter` as in `Profile.predict_ms`. Needs at
    least one record."""
    sizes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for record in records:
        rows = len(record.rows)
        predicted = profile.predict_ms(record, rows if sampled else 0, drafter)
        sizes[record.tokens, rows].append((record.times.step_ms, predicted))
    every = [pair for pairs in sizes.values() for pair in pairs]
    factor = median(measured / predicted for measured, predicted in every)
    checks = tuple(
        StepCheck(tokens, rows, len(pairs), median(m for m, _ in pairs), median(p for _, p in pairs))
        for (tokens, rows), pairs in sorted(sizes.items())
    )
    return Check(
        sizes=checks,
        steps=len(every),
        error=median(abs(predicted / measured - 1) for measured, predicted in every),
        factor=factor,
        shape_error=median(abs(factor * predicted / measured - 1) for measured, predicted in every),
    )


def survival_of(
    verified: Sequence[int], accepted: Sequence[int], steps: int, sources: Mapping[str, int]
) -> Survival | None:
    """From counts per slot over `steps` decoding steps, and steps by source; None without a draft."""
    if not steps or not verified or not verified[0]:
        return None
    shares = [a / v if v else 0.0 for a, v in zip(accepted, verified, strict=True)]
    drafts = {source: count for source, count in sources.items() if source != "none"}
    looked_up = sum(drafts.get(source, 0) for source in LookupProposer.sources)
    passes = 1 - looked_up / max(1, sum(drafts.values()))
    # Later slots are verified less often (ends of answers), so that their share may come out a little higher.
    return Survival(tuple(accumulate(shares, min)), min(1.0, verified[0] / steps), passes)


def survival_of_outputs(outputs: Sequence[Output], slots: int) -> Survival | None:
    """How far the drafts of some answers survived, over `slots` slots; those never drafted count as lost."""
    stats = [output.stats for output in outputs]
    verified, accepted = (
        _summed([s.slot_verified for s in stats], slots),
        _summed([s.slot_accepted for s in stats], slots),
    )
    return survival_of(verified, accepted, sum(s.steps for s in stats), _total(s.sources for s in stats))


def measure_survival(
    engine: Engine, slots: int, params: SamplingParams, prompts_each: int = 2
) -> tuple[Survival | None, dict[str, Survival]]:
    """How far the engine's drafts survive on code, math and chat together, and on each kind with any draft."""
    outputs = {kind: engine.generate(prompts_of(engine, kind, prompts_each), params) for kind in KINDS}
    kinds = {kind: found for kind, own in outputs.items() if (found := survival_of_outputs(own, slots)) is not None}
    return survival_of_outputs([output for own in outputs.values() for output in own], slots), kinds


def read_survival(path: Path, temperature: float) -> tuple[Survival, dict[str, Survival]]:
    """All sets together, and each, from what `dspark acceptance --json` counted at this temperature.

    Raises:
        DataError: the file cannot be read, is something else, or holds no draft at this temperature.
    """
    again = "write one with dspark acceptance --json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        cells = [(str(c["set"]), float(c["temperature"]), c) for c in values["cells"]]
        chosen = {name: cell for name, at, cell in cells if at == temperature}
        counts = {
            n: (
                list(map(int, c["slot_verified"])),
                list(map(int, c["slot_accepted"])),
                int(c["steps"]),
                {str(source): int(count) for source, count in c["sources"].items()},
            )
            for n, c in chosen.items()
        }
        kinds = {n: found for n, each in counts.items() if (found := survival_of(*each)) is not None}
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); {again}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} does not hold acceptance counts ({type(error).__name__} {error}); {again}.") from None
    slots = max((len(verified) for verified, *_ in counts.values()), default=0)
    together = survival_of(
        _summed([verified for verified, *_ in counts.values()], slots),
        _summed([accepted for _, accepted, *_ in counts.values()], slots),
        sum(steps for _, _, steps, _ in counts.values()),
        _total(sources for *_, sources in counts.values()),
    )
    if together is None:
        known = sorted({f"{at:g}" for _, at, _ in cells})
        raise DataError(
            f"{path} holds no drafts at temperature {temperature:g} (it has {', '.join(known) or 'none'}); "
            "give --temperature, or count with a drafter."
        )
    return together, kinds


def _summed(counts: Sequence[Sequence[int]], slots: int) -> list[int]:
    return [sum(each[slot] for each in counts if slot < len(each)) for slot in range(slots)]


def _total(sources: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    total: Counter[str] = Counter()
    for each in sources:
        total.update(each)
    return total


def measured_latency_ms(engine: Engine, rows: int, params: SamplingParams) -> float | None:
    """Milliseconds per token and request while `rows` requests decode together; None where they never do, since the
    cache does not hold them all or the first end before the last begin."""
    prompts = [ids for i in range(rows) for ids in prompts_of(engine, KINDS[i % len(KINDS)], 1, first=i)]
    records = [record for record in decoding_steps(engine, prompts, params) if len(record.rows) == rows]
    tokens = sum(row.committed for record in records for row in record.rows)
    return rows * sum(record.times.step_ms for record in records) / tokens if tokens else None


def check_runs() -> Iterator[tuple[int, int]]:
    """(requests at once, draft length) of `dspark profile --check`: the sizes batch 1 to 8 meets."""
    yield from ((1, 2), (1, 4), (1, 7), (4, 4), (8, 2))
