"""From cells to the rows of a report (pure)."""

from collections.abc import Mapping, Sequence

from dspark.measure.bench import metrics
from dspark.measure.bench.control import noise_of, ratios, spread, verdict
from dspark.measure.bench.records import (
    CONTROL,
    PLAIN,
    Cell,
    Group,
    ModelSize,
    Peaks,
    Proof,
    ReliabilityBin,
    Row,
)


def summarise(
    cells: Sequence[Cell],
    proofs: Sequence[Proof] = (),
    size: ModelSize | None = None,
    peaks: Peaks | None = None,
    notes: Mapping[str, str] | None = None,
) -> tuple[Row, ...]:
    """A row for every group and mode, in the order in which they first ran."""
    noise = noise_of(ratios(cells, CONTROL))
    by_place: dict[tuple[Group, str], list[Cell]] = {}
    for cell in cells:
        by_place.setdefault((cell.group, cell.mode), []).append(cell)
    speedups = {mode: ratios(cells, mode) for mode in {cell.mode for cell in cells}}
    equal = {(proof.group, proof.mode): _equal(proof) for proof in proofs}
    modes = list(dict.fromkeys(cell.mode for cell in cells if cell.round == 0))
    groups = list(dict.fromkeys(cell.group for cell in cells))
    rows = []
    for group in groups:
        for mode in modes:
            own = by_place.get((group, mode))
            if own:
                ratio = speedups[mode].get(group, []) if mode != PLAIN else []
                said = equal.get((group, mode), "")
                rows.append(_row(own, ratio, noise.get(group), size, peaks, said, (notes or {}).get(mode, "")))
    return tuple(rows)


def reliability(cells: Sequence[Cell]) -> tuple[ReliabilityBin, ...]:
    """Stated against observed survival of each mode's drafts, over all groups."""
    bins: list[ReliabilityBin] = []
    for mode in dict.fromkeys(cell.mode for cell in cells):
        counts = metrics.summed([c.counts for c in cells if c.mode == mode and c.counts is not None])
        if counts is not None:
            bins += metrics.reliability(mode, counts)
    return tuple(bins)


def _row(
    cells: Sequence[Cell],
    ratio: Sequence[float],
    noise: float | None,
    size: ModelSize | None,
    peaks: Peaks | None,
    equal: str,
    note: str,
) -> Row:
    requests = [request for cell in cells for request in cell.requests]
    counts = metrics.summed([cell.counts for cell in cells if cell.counts is not None])
    seconds = sum(cell.seconds for cell in cells)
    split = metrics.time_split(counts) if counts else None
    speedup = spread(ratio) if ratio else None
    memory = [cell.peak_memory_bytes for cell in cells if cell.peak_memory_bytes is not None]
    return Row(
        mode=cells[0].mode,
        group=cells[0].group,
        tok_per_s=spread([cell.tok_per_s for cell in cells]),
        tok_per_s_user=spread([metrics.user_tok_per_s(cell) for cell in cells]),
        speedup=speedup,
        noise=noise,
        verdict=verdict(speedup, noise) if speedup and noise is not None else None,
        requests=len(requests),
        tokens=sum(cell.tokens for cell in cells),
        ttft_ms=metrics.ttft_ms(requests),
        tpot_ms=metrics.tpot_ms(requests),
        itl_ms=metrics.itl_ms(requests),
        latency_s=metrics.latency_s(requests),
        acceptance_length=metrics.acceptance_length(counts) if counts else None,
        acceptance_rate=metrics.acceptance_rate(counts) if counts else None,
        slot_marginal=metrics.slot_marginal(counts) if counts else (),
        slot_conditional=metrics.slot_conditional(counts) if counts else (),
        histogram=metrics.acceptance_histogram(counts) if counts else (),
        draft_share=split[0] if split else None,
        verify_share=split[1] if split else None,
        host_share=split[2] if split else None,
        sources=metrics.source_shares(counts) if counts else {},
        peak_memory_bytes=max(memory, default=None),
        use=metrics.use(counts, seconds, size, peaks) if counts and size else None,
        equal=equal,
        note=note,
    )


def _equal(proof: Proof) -> str:
    if not proof.compared:
        return ""
    if proof.equal == proof.compared:
        return "yes"
    return "ties" if proof.kept else "no"
