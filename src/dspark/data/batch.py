"""Many requests through one engine with continuous admission: as one ends, the next begins."""

import hashlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

from dspark.config import SamplingParams
from dspark.engine import Chunk, Engine, Output


@dataclass(frozen=True)
class Work:
    """One request and the index of the item it belongs to."""

    index: int
    prompt_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Finished:
    """What one step brought: tokens committed by all requests, and the items that ended."""

    tokens: int
    outputs: tuple[tuple[int, Output], ...]


@dataclass(frozen=True)
class Report:
    """How far a run is. `done` counts earlier runs' items too, `tokens` only what this process generated."""

    done: int
    total: int
    tokens: int


def decode_many(engine: Engine, next_work: Callable[[], Work | None]) -> Generator[Finished]:
    """Run what `next_work` hands out until it has nothing more and all is done; one report per step.

    `next_work` is asked whenever there is room in the batch; None means nothing for now. Closing the generator aborts
    what still runs.

    Raises:
        RequestError: a request can never run on this engine.
    """
    ended: list[tuple[int, Output]] = []
    running: set[int] = set()

    def collect(index: int, chunk: Chunk) -> None:
        if chunk.output:
            running.discard(chunk.output.request_id)
            ended.append((index, chunk.output))

    try:
        while True:
            while len(running) < engine.config.max_batch and (work := next_work()):
                running.add(engine.add(work.prompt_ids, work.params, on_chunk=partial(collect, work.index)))
            if not running:
                return
            record = engine.step()
            tokens = sum(row.committed for row in record.rows) if record else 0
            outputs = tuple(ended)
            ended.clear()
            yield Finished(tokens, outputs)
    finally:
        for request_id in list(running):
            engine.abort(request_id)


def item_seed(seed: int, index: int, purpose: str) -> int:
    """A request seed (63 bits) that depends on nothing but these three."""
    digest = hashlib.sha256(f"{seed}:{index}:{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def item_share(seed: int, index: int, purpose: str) -> float:
    """A number in [0, 1) that depends on nothing but these three."""
    return item_seed(seed, index, purpose) / 2**63
