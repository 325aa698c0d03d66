"""Prompts from the target itself: it is given the beginning of a user turn and writes the rest."""

import json
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark import __version__
from dspark.artifacts.files import replacing
from dspark.config import SamplingParams
from dspark.data.batch import Report, Work, decode_many, item_seed, item_share
from dspark.data.described import Described, UserTurn, user_turn
from dspark.data.journal import Journal, check_same
from dspark.data.openings import KINDS, OPENINGS, openings_digest
from dspark.data.prompts import Chooser, defect, quotas
from dspark.engine import Engine, Output
from dspark.errors import DataError, SettingsError

_AHEAD = 1.3  # candidates under way per missing prompt: some will be rejected


@dataclass(frozen=True)
class SynthPlan:
    """What decides the prompts, beside the target.

    Raises:
        SettingsError: a value is outside its range.
    """

    count: int
    kinds: tuple[str, ...] = KINDS
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise SettingsError(f"--count is {self.count}; allowed is 1 or more.")
        if self.seed < 0:
            raise SettingsError(f"--seed is {self.seed}; allowed is 0 or more.")
        self.params(0, UserTurn("", (), ()))

    def params(self, index: int, turn: UserTurn) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=item_seed(self.seed, index, "prompt"),
            stop=turn.stop,
            stop_token_ids=turn.end_ids,
        )

    def opening(self, index: int) -> str:
        choices = OPENINGS[self.kinds[index % len(self.kinds)]]
        return choices[int(item_share(self.seed, index, "opening") * len(choices))]

    def settings(self, target: Described, dtype: str, exact: bool) -> dict[str, Any]:
        """Everything the text depends on, as plain data."""
        return {
            **asdict(self),
            "kinds": list(self.kinds),
            "openings": openings_digest(self.kinds),
            "target": target.identity(),
            "dtype": dtype,
            "exact": exact,
        }


def synthesise(engine: Engine, plan: SynthPlan, journal: Journal) -> Generator[Report]:
    """Sample candidates until every kind has its share; one report per step of the engine.

    Afterwards `journal` holds all that `chosen_prompts` needs. Stop and call again as often as you like.
    """
    chooser = choose(plan, journal)
    turn = user_turn(engine.target.tokenizer)
    under_way = [0] * len(plan.kinds)
    cursors = list(range(len(plan.kinds)))  # next candidate of each kind
    tokens = 0

    def next_work() -> Work | None:
        for kind in sorted(range(len(cursors)), key=cursors.__getitem__):
            while cursors[kind] in journal.entries:
                cursors[kind] += len(cursors)
            index = cursors[kind]
            if chooser.ended(index) or under_way[kind] >= _AHEAD * chooser.missing(kind) + 1:
                continue
            cursors[kind] += len(cursors)
            under_way[kind] += 1
            text = turn.header + plan.opening(index)
            return Work(index, engine.target.tokenizer.encode(text, add_special_tokens=False), plan.params(index, turn))
        return None

    with closing(decode_many(engine, next_work)) as steps:
        for step in steps:
            tokens += step.tokens
            for index, output in step.outputs:
                under_way[index % len(under_way)] -= 1
                text, why = _judge(engine, plan.opening(index), output)
                journal.add(index, [text, why])
                chooser.offer(index, text, why)
            yield Report(chooser.filled, plan.count, tokens)
            if chooser.done:
                return


def _judge(engine: Engine, opening: str, output: Output) -> tuple[str, str | None]:
    """The whole user turn and what is wrong with it."""
    if output.error:
        return opening, "error"
    tokenizer = engine.target.tokenizer
    ids = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
    if tokenizer.decode(ids) != tokenizer.decode(ids, skip_special_tokens=False):
        return opening, "control tokens"
    text = (opening + output.text).strip()
    return text, defect(text, ids, output.finish_reason == "stop")


def choose(plan: SynthPlan, journal: Journal) -> Chooser:
    """What is chosen from the candidates in the journal."""
    chooser = Chooser(plan.kinds, quotas(plan.count, len(plan.kinds)))
    for index in sorted(journal.entries):
        chooser.offer(index, *journal.entries[index])
    return chooser


def write_prompts(path: Path, plan: SynthPlan, settings: dict[str, Any], journal: Journal) -> Chooser:
    """Write the chosen prompts as OpenAI messages with their kind and where they come from, one a line; the whole file
    appears at once.

    Raises:
        DataError: nothing was chosen, or the file cannot be written.
    """
    chooser = choose(plan, journal)
    source = {"made_by": f"dspark {__version__}", **settings}
    if not chooser.chosen:
        raise DataError(
            f"No sampled prompt passed the filters ({_counts(chooser)}); raise --temperature or --max-tokens, or give "
            "prompts in a file."
        )
    lines = [
        json.dumps(
            {
                "messages": [{"role": "user", "content": text}],
                "kind": chooser.kind(index),
                "source": {**source, "index": index},
            },
            ensure_ascii=False,
        )
        for index, text in chooser.chosen
    ]
    try:
        with replacing(path) as part, part.open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written ({error.strerror or error}); make room there and run the same command again."
        ) from None
    return chooser


def _counts(chooser: Chooser) -> str:
    return ", ".join(f"{count} {why}" for why, count in chooser.rejected.most_common())


def prompts_written(path: Path, settings: dict[str, Any]) -> bool:
    """Whether an earlier run of the same settings already wrote `path`.

    Raises:
        DataError: the file there was made otherwise.
    """
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline())
        source = first["source"]
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"{path} exists and was not made by this command; choose another --out.") from None
    check_same(path, source, settings)
    return True
