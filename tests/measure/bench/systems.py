"""Systems whose time is counted and not spent, and prompts for them."""

from dspark.config import SamplingParams
from dspark.measure.bench.drive import Ask, Event


class Clock:
    """Stands still until somebody moves it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Counting:
    """Gives every running request one token a step, `step_s` later; answers are 1, 2, 3, ... `length` ids."""

    promises, note = True, ""

    def __init__(self, clock=None, step_s=1.0, length=3, at_once=None):
        self.clock, self.step_s, self.length, self.at_once = clock or Clock(), step_s, length, at_once
        self.running, self.started, self.most, self.aborted = {}, [], 0, False

    def start(self, ask):
        key = len(self.started)
        self.started.append(ask)
        self.running[key] = 0
        self.most = max(self.most, len(self.running))
        return key

    def step(self):
        self.clock.now += self.step_s
        events = []
        for key in list(self.running):
            self.running[key] += 1
            done = self.running[key] == min(self.length, self.started[key].params.max_tokens)
            ids = tuple(range(1, self.running.pop(key) + 1)) if done else None
            events.append(Event(key, self.clock.now, 1, "length" if done else None, ids))
        return events

    def abort(self):
        self.aborted = True
        self.running.clear()

    def counts(self):
        return None


def asks(count, max_tokens=10):
    return [
        Ask(
            n, (1, 2), ({"role": "user", "content": "?"},), SamplingParams(temperature=0, max_tokens=max_tokens, seed=n)
        )
        for n in range(count)
    ]
