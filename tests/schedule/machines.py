"""Cost tables made by hand: what a measured profile would say of machines that do not exist."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dspark.schedule import Choice, CostCurves, Offer, RowView, StepView


@dataclass(frozen=True)
class Machine:
    """A target pass over n tokens takes `passes(n)` ms; drafting takes `draft` and `slot` for each slot after it."""

    passes: Callable[[int], float]
    draft: float = 0.0
    slot: float = 0.0
    host: float = 0.0

    def pass_ms(self, tokens: int, rows: int, context: int) -> float:
        return self.passes(tokens)

    def draft_ms(self, rows: int, slots: int | None = None, sampled_rows: int = 0) -> float:
        return self.draft + self.slot * (slots or 0) if rows else 0.0

    def host_ms(self, rows: int, tokens: int | None = None, sampled_rows: int = 0) -> float:
        return self.host


def curves(passes: Callable[[int], float] | Sequence[float], draft: float = 0.0, slot: float = 0.0) -> CostCurves:
    """From a function of the pass's tokens, or from a table whose last value goes on."""
    if not callable(passes):
        table = list(passes)
        return CostCurves(Machine(lambda tokens: table[min(tokens, len(table)) - 1], draft, slot))
    return CostCurves(Machine(passes, draft, slot))


def survivals(chances: Sequence[float]) -> tuple[float, ...]:
    result, product = [], 1.0
    for chance in chances:
        product *= chance
        result.append(product)
    return tuple(result)


def one_offer(chances: Sequence[float], drafter_pass: bool = False, confident: bool = False) -> Offer:
    return Offer("toy", survivals(chances), drafter_pass, confident)


def step_of(rows: Sequence[Sequence[float]], free: bool | Sequence[bool] = True, **offer: bool) -> StepView:
    """Every row offers one source whose slots are kept with the given chances."""
    frees = [free] * len(rows) if isinstance(free, bool) else free
    views = tuple(
        RowView(10, len(chances), f, offers=(one_offer(chances, **offer),) if chances else ())
        for chances, f in zip(rows, frees, strict=True)
    )
    return StepView(views, tokens=len(rows), pass_rows=len(rows), context=100)


def whole(step: StepView) -> tuple[Choice, ...]:
    """Draft all that is offered."""
    return tuple(Choice(row.offers[0], len(row.offers[0].survival)) if row.offers else Choice() for row in step.rows)
