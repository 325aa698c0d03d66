"""A machine whose clock only models and tests move: a pass takes what a cost table says, so timed behaviour repeats."""

from types import SimpleNamespace

import pytest

from dspark.engine import Engine
from dspark.target import Target
from tests.engine import support as s
from tests.schedule.machines import Machine

# About the shapes measured on two cores: a draft token costs a tenth of a step, a drafter pass a quarter.
TWO_CORES = Machine(lambda tokens: 9.0 + 1.0 * tokens, draft=2.0, slot=0.2, host=0.5)


class Clock:
    """Time in milliseconds; moved by the passes of the target and of the drafter it watches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: Target, costs: Machine = TWO_CORES):
        self.now_ms, self.costs, self._patch = 0.0, costs, monkeypatch
        run = target.decoder.run

        def timed_run(tokens, rows, *rest):
            self.now_ms += costs.pass_ms(len(tokens), len(rows), 0) + costs.host_ms(len(rows))
            return run(tokens, rows, *rest)

        monkeypatch.setattr(target.decoder, "run", timed_run)
        for module in ("loop", "scheduler"):
            clock = SimpleNamespace(perf_counter=lambda: self.now_ms / 1e3)
            monkeypatch.setattr(f"dspark.engine.{module}.time", clock)

    def watch(self, drafter) -> None:
        """Count the drafter's proposals as passes of a drafter."""
        propose = drafter.propose

        def timed_propose(rows, lens, streams):
            if active := sum(n > 0 for n in lens):
                self.now_ms += self.costs.draft_ms(active, max(lens))
            return propose(rows, lens, streams)

        self._patch.setattr(drafter, "propose", timed_propose)


def run(engine: Engine, prompts, params) -> list:
    """Answer prompts together; the records of their steps."""
    records: list = []
    engine.listeners.append(records.append)
    engine.generate(prompts, params)
    engine.listeners.remove(records.append)
    return records


def decoding_ms(records) -> tuple[float, int]:
    """Time of the steps that read no prompt, and the tokens they committed."""
    steps = [record for record in records if not any(row.prefill for row in record.rows)]
    return sum(r.times.step_ms for r in steps), sum(row.committed for r in steps for row in r.rows)


def engine_on(target: Target, proposer, costs: Machine = TWO_CORES, **settings) -> Engine:
    base = s.toy_engine(target)
    return Engine(base.target, proposer, type(base.config)(model="toy", kv_gb=0.02, **settings), costs=costs)
