"""The field's figures from records, each with its definition (pure)."""

from collections.abc import Sequence
from itertools import zip_longest

from dspark.measure.bench.records import (
    Cell,
    ModelSize,
    Peaks,
    Quantiles,
    ReliabilityBin,
    RequestRecord,
    StepCounts,
    Use,
)

DEFINITIONS: dict[str, str] = {
    "tok/s": "Output tokens of all requests over the seconds from the first arrival to the last token, prompts "
    "included.",
    "tok/s per user": "Output tokens of a request over the seconds from its arrival to its last token; median.",
    "speed-up": "tok/s over plain's in the same round on the same prompts; median and quartiles over rounds. In open "
    "loop: plain's mean whole-answer latency over the mode's.",
    "noise": "How far from 1 the quartiles of plain over plain stray, in this group or over all, whichever is more.",
    "verdict": "faster or slower when the quartiles of the speed-up lie beyond the noise, in 3 rounds or more; "
    "else none.",
    "AL": "Acceptance length: committed tokens per decoding step; the bonus token and a final end token count, and so "
    "do steps without a draft. The token that comes with the prompt's pass does not.",
    "acceptance rate": "Accepted over verified draft tokens, before a cut at an end token or a limit.",
    "marginal acceptance": "Per draft slot: accepted over all steps with a draft, however long it was.",
    "conditional acceptance": "Per draft slot: accepted over verified, where all earlier slots were accepted.",
    "acceptance histogram": "Shares of the steps with a draft, by how many draft tokens were accepted.",
    "TTFT": "Milliseconds from a request's arrival to its first token.",
    "TPOT": "Milliseconds from a request's first to its last token over the tokens after the first.",
    "ITL": "Milliseconds between one arrival of tokens and the next; one arrival may bring several tokens.",
    "latency": "Seconds from a request's arrival to its last token.",
    "time split": "Shares of drafting, the target's pass and everything else, in steps that run no prompt tokens.",
    "peak memory": "Largest resident memory of the process during the cell, all loaded modes included; on a GPU, the "
    "largest allocated by torch.",
    "bytes/s": "Weights, read once a pass, and the cached keys and values that each pass reads, per second; the "
    "target's only.",
    "FLOP/s": "Two operations per weight and token in the layers, and per sampled position in the head, per second; "
    "the target's only, attention left out. Rejected drafts count: it says how busy the machine is, not how useful.",
    "utilisation": "bytes/s and FLOP/s over the machine's own, measured before the run: the fastest of several sums "
    "over a large array, and of several large matrix products (float32; on a GPU bfloat16).",
    "output": "yes: the same ids as plain for every prompt; ties: different only where rounding turned a near-tie; no.",
}


def quantiles(values: Sequence[float]) -> Quantiles | None:
    """p50, p90 and p99, linear between values; None without any."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return Quantiles(at(0.5), at(0.9), at(0.99))


# Requests -----------------------------------------------------------------------------------------------------------


def ttft_ms(requests: Sequence[RequestRecord]) -> Quantiles | None:
    return quantiles([1e3 * r.ttft_s for r in requests if r.ttft_s is not None])


def tpot_ms(requests: Sequence[RequestRecord]) -> Quantiles | None:
    return quantiles(
        [
            1e3 * (r.latency_s - r.ttft_s) / (r.output_tokens - 1)
            for r in requests
            if r.ttft_s is not None and r.output_tokens > 1
        ]
    )


def itl_ms(requests: Sequence[RequestRecord]) -> Quantiles | None:
    return quantiles([gap for r in requests for gap in r.gaps_ms])


def latency_s(requests: Sequence[RequestRecord]) -> Quantiles:
    found = quantiles([r.latency_s for r in requests])
    assert found is not None, "a cell has at least one request"
    return found


def user_tok_per_s(cell: Cell) -> float:
    found = quantiles([r.output_tokens / r.latency_s for r in cell.requests])
    assert found is not None
    return found.p50


# Steps --------------------------------------------------------------------------------------------------------------


def summed(counts: Sequence[StepCounts]) -> StepCounts | None:
    """Sums over cells; None without any."""
    if not counts:
        return None

    def total(name: str) -> float:
        return sum(getattr(c, name) for c in counts)

    def slots(name: str) -> tuple[float, ...]:
        return tuple(map(sum, zip_longest(*(getattr(c, name) for c in counts), fillvalue=0)))

    values: dict[str, object] = {}
    for name in StepCounts.__dataclass_fields__:
        example = getattr(counts[0], name)
        values[name] = slots(name) if isinstance(example, tuple) else None if isinstance(example, dict) else total(name)
    values["sources"] = {
        source: sum(c.sources.get(source, 0) for c in counts)
        for source in sorted({s for c in counts for s in c.sources})
    }
    return StepCounts(**values)  # type: ignore[arg-type]


def acceptance_length(counts: StepCounts) -> float | None:
    return counts.committed / counts.steps if counts.steps else None


def acceptance_rate(counts: StepCounts) -> float | None:
    return counts.accepted / counts.verified if counts.verified else None


def slot_marginal(counts: StepCounts) -> tuple[float, ...]:
    return tuple(accepted / counts.draft_steps for accepted in counts.slot_accepted)


def slot_conditional(counts: StepCounts) -> tuple[float, ...]:
    """Ends before the first slot that no step reached."""
    pairs = zip(counts.slot_accepted, counts.slot_reached, strict=True)
    return tuple(accepted / reached for accepted, reached in pairs if reached)


def acceptance_histogram(counts: StepCounts) -> tuple[float, ...]:
    return tuple(steps / counts.draft_steps for steps in counts.histogram)


def time_split(counts: StepCounts) -> tuple[float, float, float] | None:
    """Shares of draft, verify and host time."""
    parts = (counts.draft_ms, counts.verify_ms, counts.host_ms)
    total = sum(parts)
    return (parts[0] / total, parts[1] / total, parts[2] / total) if total else None


def source_shares(counts: StepCounts) -> dict[str, float]:
    return {source: steps / counts.steps for source, steps in counts.sources.items()} if counts.steps else {}


def use(counts: StepCounts, seconds: float, size: ModelSize, peaks: Peaks | None) -> Use:
    """What the target's passes asked of the machine in `seconds`."""
    bytes_per_s = (counts.passes * size.weight_bytes + counts.pass_cached * size.kv_token_bytes) / seconds
    flop_per_s = (counts.pass_tokens * size.flop_per_token + counts.pass_sampled * size.head_flop) / seconds
    if peaks is None:
        return Use(bytes_per_s, flop_per_s, None, None)
    return Use(bytes_per_s, flop_per_s, bytes_per_s / peaks.bytes_per_s, flop_per_s / peaks.flop_per_s)


def reliability(mode: str, counts: StepCounts) -> tuple[ReliabilityBin, ...]:
    """Stated against observed survival of verified slots; empty bins are left out."""
    bins = zip(counts.stated_count, counts.stated_sum, counts.stated_kept, strict=True)
    return tuple(ReliabilityBin(mode, stated / n, kept / n, n) for n, stated, kept in bins if n)
