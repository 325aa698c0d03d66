"""What a step costs on one machine: measured points, and a lookup that is cheap enough to ask dozens of times a step.

Costs are staircases, because matrix kernels work through tokens in groups: points are kept as measured and straight
lines drawn only between neighbours, so no step is smoothed away.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from dspark.config import StepRecord
from dspark.errors import ProfileError


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost in milliseconds over a whole-numbered size that begins at 1. It never falls.

    Exact at the measured sizes, linear between them, and beyond the last one as steep as its last stretch. Size 0
    costs nothing.

    Raises:
        ProfileError: sizes do not rise from 1, or costs are not finite, negative or falling.
    """

    at: tuple[int, ...]
    ms: tuple[float, ...]
    _dense: tuple[float, ...] = field(init=False, repr=False, compare=False)
    _slope: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        at, ms = self.at, self.ms
        rising = bool(at) and at[0] == 1 and all(a < b for a, b in pairwise(at))
        if not rising or len(at) != len(ms):
            raise ProfileError(f"A profile's sizes are {list(at)[:8]}; allowed are rising sizes from 1, one per cost.")
        if not all(math.isfinite(cost) and cost >= 0 for cost in ms) or any(a > b for a, b in pairwise(ms)):
            raise ProfileError(f"A profile's costs are {list(ms)[:8]}; allowed are costs in ms that never fall.")
        dense = [0.0, ms[0]]
        for (a, b), (low, high) in zip(pairwise(at), pairwise(ms), strict=True):
            # Both ends exactly as measured, whatever rounding does between them.
            dense += [low + (high - low) * (n - a) / (b - a) for n in range(a + 1, b)] + [high]
        slope = (ms[-1] - ms[-2]) / (at[-1] - at[-2]) if len(at) > 1 else 0.0
        object.__setattr__(self, "_dense", tuple(dense))
        object.__setattr__(self, "_slope", slope)

    def __call__(self, size: float) -> float:
        whole = int(size)
        if whole >= self.at[-1]:
            return self.ms[-1] + (size - self.at[-1]) * self._slope
        low = self._dense[whole]
        return low if size == whole else low + (size - whole) * (self._dense[whole + 1] - low)

    def scaled(self, factor: float) -> "Curve":
        return Curve(self.at, tuple(cost * factor for cost in self.ms))


NOTHING = Curve((1,), (0.0,))


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of one target with one proposer on one machine, in milliseconds.

    A target pass of T tokens over B requests costs
    `tokens(T) + rows(B) + B * attention(T / B) * (context - base_context)`: the matrices see T tokens and nothing
    else; attention is called once per request, and reads every cached position.

    Raises:
        ProfileError: a number is outside its range.
    """

    tokens: Curve  # a pass over one request with `base_context` cached positions
    rows: Curve  # what B requests add to it
    attention: Curve  # over tokens of a request: per request and cached position beyond `base_context`
    base_context: int
    block: int  # tokens of a whole draft; 0 = the proposer never drafts
    draft: Curve  # over requests: one token drafted for each, catching up with what the last step kept included
    draft_slot: Curve  # over requests: each further token
    draft_sampled_ms: float  # more per drafted token of a request with a temperature above 0
    host: Curve  # over requests: everything outside passes in a step without drafts, temperature 0
    host_token_ms: float  # more per drafted token, temperature 0
    host_token_sampled_ms: float  # and more than that with a temperature above 0
    host_sampled_ms: float  # more per request with a temperature above 0

    def __post_init__(self) -> None:
        for name in ("draft_sampled_ms", "host_token_ms", "host_token_sampled_ms", "host_sampled_ms"):
            value = getattr(self, name)
            if not (_is_number(value) and value >= 0):
                raise ProfileError(f"{name} of a profile is {value!r}; allowed is a time in ms of 0 or more.")
        for name in ("base_context", "block"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ProfileError(f"{name} of a profile is {value!r}; allowed is a whole number of 0 or more.")

    def pass_ms(self, tokens: int, rows: int, context: int) -> float:
        """One target pass: `tokens` of all requests together, output head included, `rows` requests, and `context`
        cached positions per request (the largest, or the mean where they differ much)."""
        weights, attention = self.pass_parts(tokens, rows, context)
        return weights + attention

    def pass_parts(self, tokens: int, rows: int, context: int) -> tuple[float, float]:
        """`pass_ms` split into what the tokens cost (weights) and what requests and their context add (attention)."""
        if not rows or not tokens:
            return 0.0, 0.0
        more = context - self.base_context
        reading = rows * self.attention(tokens / rows) * more if more > 0 else 0.0
        return self.tokens(tokens), self.rows(rows) + reading

    def draft_ms(self, rows: int, slots: int | None = None, sampled_rows: int = 0) -> float:
        """Drafting `slots` tokens (None: a whole block) for each of `rows` requests, of which `sampled_rows` draw
        them at a temperature above 0."""
        slots = self.block if slots is None else slots
        if not rows or not slots or not self.block:
            return 0.0
        return self.draft(rows) + (slots - 1) * self.draft_slot(rows) + sampled_rows * slots * self.draft_sampled_ms

    def host_ms(self, rows: int, tokens: int | None = None, sampled_rows: int = 0) -> float:
        """Everything outside model passes in a step that samples for `rows` requests and verifies `tokens` in all
        (None: no drafts)."""
        drafted = max(0, tokens - rows) if tokens is not None else 0
        share = sampled_rows / rows if rows else 0.0  # drafts are taken to be spread evenly
        drafting = drafted * (self.host_token_ms + share * self.host_token_sampled_ms)
        return self.host(rows) + drafting + sampled_rows * self.host_sampled_ms

    def step_ms(self, rows: int, slots: int, context: int, sampled_rows: int = 0) -> float:
        """A whole step in which each of `rows` requests drafts and verifies `slots` tokens (0: plain decoding)."""
        tokens = rows * (1 + slots)
        passes = self.pass_ms(tokens, rows, context) + self.draft_ms(rows, slots, sampled_rows)
        return passes + self.host_ms(rows, tokens, sampled_rows)

    def predict_ms(self, record: StepRecord, sampled_rows: int = 0, drafter: str | None = None) -> float:
        """What a recorded step of decoding requests should have taken. `drafter` is the source whose drafts cost a
        pass (None: every source)."""
        drafted = [row.drafted for row in record.rows if row.drafted and drafter in (None, row.source)]
        rows = len(record.rows)
        verify = self.pass_ms(record.tokens, rows, record.context)
        draft = self.draft_ms(len(drafted), max(drafted, default=0), min(sampled_rows, len(drafted)))
        return verify + draft + self.host_ms(rows, record.tokens, sampled_rows)

    def scaled(self, factor: float) -> "Profile":
        """Every cost times `factor`: the same machine in a slower or faster moment."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            if isinstance(value, Curve):
                values[name] = value.scaled(factor)
            elif name.endswith("_ms"):
                values[name] = value * factor
        return Profile(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for profile.json."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {n: {"at": list(v.at), "ms": list(v.ms)} if isinstance(v, Curve) else v for n, v in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Profile":
        """Read what `to_dict` wrote. Raises ProfileError when a key is missing, unknown or outside its range."""
        known = [f.name for f in fields(cls)]
        if wrong := sorted(set(known) ^ set(values)):
            raise ProfileError(f"The profile's costs lack or do not know {', '.join(wrong)}; measure it again.")
        curves = {f.name: _curve(f.name, values) for f in fields(cls) if f.type is Curve}
        return cls(**{**values, **curves})


# Below this many steps of a kind its average says little.
_STEADY = 50
_WEIGHT = 0.05  # of the newest step
_SHAPE, _LEVEL = math.log(1.25), math.log(2.0)


@dataclass(frozen=True, slots=True)
class ProfileDrift:
    """How observed step times compare with predicted ones, steps with and without drafts apart.

    Plans compare costs with each other, so a moment in which everything is slower changes none of them: `factor` says
    by how much. What makes a profile wrong is one kind of step drifting away from the other. Values are averages of
    logarithms of observed over predicted; a single step counts as a factor of two at most.
    """

    plain: float = 0.0
    drafted: float = 0.0
    plain_steps: int = 0
    drafted_steps: int = 0

    def observe(self, observed_ms: float, predicted_ms: float, drafted: bool) -> "ProfileDrift":
        """The tracker after one more step. Steps without a prediction or a time are passed over."""
        if not (observed_ms > 0 and predicted_ms > 0):
            return self
        ratio = math.log(observed_ms / predicted_ms)
        if drafted:
            mean = _moved(self.drafted, ratio, self.drafted_steps)
            return ProfileDrift(self.plain, mean, self.plain_steps, self.drafted_steps + 1)
        mean = _moved(self.plain, ratio, self.plain_steps)
        return ProfileDrift(mean, self.drafted, self.plain_steps + 1, self.drafted_steps)

    @property
    def factor(self) -> float:
        """Observed over predicted, for `Profile.scaled`; 1 before the first step."""
        kinds = ((self.plain, self.plain_steps), (self.drafted, self.drafted_steps))
        weights = [min(steps, _STEADY) for _, steps in kinds]
        if not sum(weights):
            return 1.0
        return math.exp(sum(w * mean for w, (mean, _) in zip(weights, kinds, strict=True)) / sum(weights))

    @property
    def needs_refresh(self) -> bool:
        """Whether steps with drafts have become dearer or cheaper than the profile says, measured in steps without
        (by a quarter), or everything has moved by a factor of two, beyond which proportions rarely hold."""
        both = min(self.plain_steps, self.drafted_steps) >= _STEADY
        if both and abs(self.drafted - self.plain) > _SHAPE:
            return True
        return max(self.plain_steps, self.drafted_steps) >= _STEADY and abs(math.log(self.factor)) > _LEVEL


def _moved(mean: float, value: float, steps: int) -> float:
    change = max(-_LEVEL, min(_LEVEL, value - mean))
    return mean + max(_WEIGHT, 1 / (steps + 1)) * change


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _curve(name: str, values: Mapping[str, Any]) -> Curve:
    found = values[name]
    at: Any = found.get("at") if isinstance(found, dict) else None
    ms: Any = found.get("ms") if isinstance(found, dict) else None
    whole = isinstance(at, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in at)
    if not whole or not isinstance(ms, list) or not all(map(_is_number, ms)):
        raise ProfileError(f"{name} of the profile is no list of sizes with a cost in ms each; measure it again.")
    return Curve(tuple(at), tuple(map(float, ms)))
