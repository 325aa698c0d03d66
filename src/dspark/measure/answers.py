"""Have an engine answer many prompts under several decodings, repeatably."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dspark.config import SamplingParams
from dspark.engine import Chunk, Engine, Output
from dspark.errors import SettingsError
from dspark.schedule.calibration import RULES

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Decoding:
    """A temperature and the acceptance rules that decode alike at it."""

    rules: tuple[str, ...]
    temperature: float

    @property
    def rule(self) -> str:
        """The one to decode with."""
        return self.rules[0]

    def __str__(self) -> str:
        return f"T={self.temperature:g}" if self.temperature == 0 else f"T={self.temperature:g} {'/'.join(self.rules)}"


def decodings(rules: Sequence[str], temperatures: Sequence[float]) -> list[Decoding]:
    """Every temperature with every rule; greedy decoding once, since it is the same under all rules.

    Raises:
        SettingsError: an unknown rule, a temperature below 0, or none of them.
    """
    for rule in rules:
        if rule not in RULES:
            raise SettingsError(f"rule is {rule!r}; allowed are {', '.join(RULES)}.")
    for temperature in temperatures:
        if not 0 <= temperature < float("inf"):
            raise SettingsError(f"temperature is {temperature}; allowed is 0 (greedy) or more.")
    if not rules or not temperatures:
        raise SettingsError("There is nothing to measure; give at least one rule and one temperature.")
    found: list[Decoding] = []
    for temperature in dict.fromkeys(temperatures):
        names = tuple(dict.fromkeys(rules))
        found += [Decoding(r, temperature) for r in ([names] if temperature == 0 else [(n,) for n in names])]
    return found


# Builds the engine that decodes one way. Each has a proposer of its own: proposers learn, and number their requests.
EngineFor = Callable[[Decoding], Engine]


def sibling(engine: Engine, **settings: Any) -> Engine:
    """An engine on the same target with other settings and a proposer of its own, which has learnt nothing yet."""
    return Engine.over(engine.target, replace(engine.config, **settings))


def seeded(
    prompts: Iterable[Ids], temperature: float, max_tokens: int, seed: int
) -> Iterator[tuple[Ids, SamplingParams]]:
    """The prompts as requests without warpers, each with randomness of its own that repeats from run to run."""
    for index, ids in enumerate(prompts):
        yield ids, SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed * 1_000_003 + index)


def answers(
    engine: Engine, requests: Iterable[tuple[Ids, SamplingParams]], enough: Callable[[], bool] = lambda: False
) -> Iterator[Output]:
    """Answer requests in their order as places get free; yields each output as it ends.

    Once `enough`, no new one begins and those begun are answered to their end, so that long answers count with all
    their steps. Closing the iterator aborts what runs.
    """
    waiting = iter(requests)
    running: set[int] = set()
    ended: list[Output] = []

    def collect(chunk: Chunk) -> None:
        if chunk.output:
            ended.append(chunk.output)

    try:
        while True:
            while len(running) < engine.config.max_batch and not enough():
                request = next(waiting, None)
                if request is None:
                    break
                running.add(engine.add(*request, on_chunk=collect))
            if not running:
                return
            engine.step()
            while ended:
                running.discard(ended[0].request_id)
                yield ended.pop(0)
    finally:
        for request_id in running:
            engine.abort(request_id)
