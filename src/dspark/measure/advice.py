"""Why drafting does not pay, and what would change that: plain sentences from a plan. Pure."""

from collections.abc import Mapping, Sequence

from dspark.measure.plan import Load, PlanRow, Survival, best_block, break_even, drafter_runs, speedups, step_parts
from dspark.schedule.profile import Profile

# A drafting model much larger than this share of its target's cost has to be right nearly always.
MOST_DRAFT_SHARE = 1 / 3
USUAL_DRAFT_SHARE = 0.1  # of a plain step; where not even such a drafter would pay, speed is not the trouble
USUAL_CONTEXT, USUAL_BLOCK = 512, 4
USUAL_ROWS = (1, 8, 32)


def advice(
    profile: Profile,
    survival: Survival,
    rows: Sequence[PlanRow],
    context: int,
    kinds: Mapping[str, Survival] | None = None,
    sampled: bool = False,
) -> list[str]:
    """What stands in the way, in plain sentences; nothing when drafting pays wherever it was asked for."""
    first = min(rows, key=lambda row: row.concurrency)
    load = Load(first.concurrency, context, sampled)
    if not first.best:
        return [_why_not(profile, survival, load, first), *_drafter_advice(profile, load, len(survival.slots))]
    said = []
    if late := [str(row.concurrency) for row in rows if not row.best]:
        said.append(
            f"With {', '.join(late)} requests at once no draft pays: the pass is busy with the requests themselves. "
            "Policy auto stops drafting there."
        )
    hopeless = [name for name, own in (kinds or {}).items() if not best_block(speedups(profile, load, own))]
    if hopeless:
        said.append(f"Drafts do not pay on this kind of text: {', '.join(hopeless)}.")
    return said + _drafter_advice(profile, load, first.best)


def cost_summary(profile: Profile) -> str:
    """From which acceptance on drafts pay, at the sizes people ask about."""
    said = []
    for rows in USUAL_ROWS:
        needed = break_even(profile, Load(rows, USUAL_CONTEXT), profile.block or USUAL_BLOCK)
        said.append(f"{'never' if needed is None else f'above {needed:.0%} kept'} with {rows} at once")
    return f"drafts pay {', '.join(said)}"


def cost_advice(profile: Profile) -> list[str]:
    """What can be said without knowing how many drafts are kept: nothing when drafting can pay for one request."""
    load, block = Load(1, USUAL_CONTEXT), profile.block or USUAL_BLOCK
    said = _drafter_advice(profile, load, block)
    if break_even(profile, load, block) is None:
        return ["even drafts that are always kept would not pay; use --proposer none or lookup.", *said]
    late = [str(rows) for rows in USUAL_ROWS[1:] if break_even(profile, Load(rows, USUAL_CONTEXT), block) is None]
    if late:
        said.append(
            f"with {' and '.join(late)} requests at once not even drafts that are always kept pay; use --policy auto, "
            "which stops drafting there."
        )
    return said


def _why_not(profile: Profile, survival: Survival, load: Load, row: PlanRow) -> str:
    """Why the smallest batch is fastest without drafts."""
    plain = step_parts(profile, load, 0).total
    steps = {k: step_parts(profile, load, k) for k in range(1, len(survival.slots) + 1)}
    room, block = max((plain * survival.kept(k) - (step.total - step.draft), k) for k, step in steps.items())
    if room > USUAL_DRAFT_SHARE * plain and profile.block and survival.passes:
        worth = room / drafter_runs(load, survival.passes)
        return (
            f"The drafter is too slow for this target: {block} tokens take it {steps[block].draft:.1f} ms beside a "
            f"plain step of {plain:.1f} ms, and at this acceptance they pay below {worth:.1f} ms."
        )
    needed = "even certain drafts would not pay" if row.break_even is None else f"{row.break_even:.0%} is needed"
    return (
        f"The drafter is too weak for this target: its first token is kept {survival.slots[0]:.0%} of the time, "
        f"and {needed}."
    )


def _drafter_advice(profile: Profile, load: Load, block: int) -> list[str]:
    """What about the drafter itself costs too much."""
    if not profile.block:
        return []
    said = []
    sampled = load.rows if load.sampled else 0
    draft, plain = profile.draft_ms(load.rows, block, sampled), profile.pass_ms(load.rows, load.rows, load.context)
    if draft / block > MOST_DRAFT_SHARE * plain:
        said.append(
            f"A drafted token costs {draft / block / plain:.0%} of a pass of the target: choose a drafter of a third "
            "to a fifth of its size, or smaller."
        )
    slots = draft - profile.draft(load.rows)
    if block > 1 and slots > draft / 2 and draft > 0.1 * plain:
        said.append(
            f"{slots / draft:.0%} of drafting goes into taking tokens one after the other: a smaller draft vocabulary "
            "or a head of lower rank makes that cheaper."
        )
    return said
