"""What a benchmark run writes down, from single requests to the rows of its report; all of it is one JSON file.

Times are seconds (`_s`) or milliseconds (`_ms`); token counts are output tokens unless named otherwise. A field that
does not apply to a mode (step counts of another engine, say) is None, never 0.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from itertools import zip_longest
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from dspark.artifacts.files import replacing
from dspark.errors import DataError

FORMAT, VERSION = "dspark-bench", 1
PLAIN, CONTROL = "plain", "plain again"  # the denominator of every ratio, and its twin that shows the noise
RESULT_FILE = "bench.json"


class Record:
    """Plain data that survives JSON. Unknown or missing keys are errors."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Raises DataError naming the key that is missing or unknown."""
        hints = get_type_hints(cls)
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        if odd := sorted(set(values) - known):
            raise DataError(f"{cls.__name__} has an unknown key {odd[0]!r}; it is of another version of dspark bench.")
        try:
            return cls(**{name: _revived(hints[name], value) for name, value in values.items()})
        except TypeError as error:
            raise DataError(f"{cls.__name__} cannot be read ({error}); run dspark bench again.") from None


def _revived(hint: Any, value: Any) -> Any:
    """A value of JSON as its annotated type: nested records, tuples, mappings, or itself."""
    if get_origin(hint) is UnionType:
        if value is None:
            return None
        hint = next(part for part in get_args(hint) if part is not NoneType)
    if is_dataclass(hint) and isinstance(hint, type) and issubclass(hint, Record):
        return hint.from_dict(value)
    if get_origin(hint) is tuple:
        return tuple(_revived(get_args(hint)[0], each) for each in value)
    if get_origin(hint) is dict:
        return {key: _revived(get_args(hint)[1], each) for key, each in value.items()}
    return value


# What was run, and where ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Settings(Record):
    """What decides the work of a run; a rerun with the same settings goes on where the first one stopped."""

    target: str
    modes: tuple[str, ...]  # as asked for; `plain` and its control are always among them
    kinds: tuple[str, ...]
    temperatures: tuple[float, ...]
    concurrencies: tuple[int, ...]
    depths: tuple[int, ...]  # prompt tokens that prompts are padded to; 0 = prompts as they are
    rates: tuple[float, ...] = ()  # arrivals a second, open loop; empty = closed loop only
    rate_share: float | None = None  # open loop at this share of the requests a second that plain sustains
    max_tokens: int = 256
    min_tokens: int = 1500  # output tokens a cell has at least
    limit: int | None = None  # prompts a kind
    rounds: int = 3
    seed: int = 0
    drafter: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    exact: bool = False
    acceptance: str = "auto"  # rule of requests, all of which have a seed; "auto" is then `coupled`
    threads: int | None = None
    prompts: str = "built in"  # or the files they come from
    prompts_digest: str = ""  # hash of all prompts


@dataclass(frozen=True, slots=True)
class Peaks(Record):
    """What this machine can do, measured just before: reading memory, and float32 matrix products."""

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True)
class ModelSize(Record):
    """What one pass of the target costs at least: bytes of weights read, multiply-adds of one token, cache read."""

    weight_bytes: int  # read once a pass, however many tokens
    flop_per_token: int  # 2 x weights of the layers' matrices
    kv_token_bytes: int  # cached keys and values of one position
    head_flop: int = 0  # 2 x weights of the output head, for each position whose logits are wanted


@dataclass(frozen=True, slots=True)
class Machine(Record):
    """Where it ran. `versions` are of packages; load is the 1-minute average."""

    cpu: str
    cores: int
    threads: int
    memory_bytes: int
    device: str
    versions: dict[str, str]
    load_before: float | None = None
    load_after: float | None = None
    peaks: Peaks | None = None


# What happened ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group(Record):
    """What all modes of a comparison share. `concurrency` requests are kept in flight; with a `rate` (arrivals a
    second) it is the most that run at once."""

    kind: str
    temperature: float
    concurrency: int
    depth: int = 0
    rate: float | None = None

    def __str__(self) -> str:
        parts = [self.kind, f"T={self.temperature:g}"]
        parts.append(f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} arrivals/s")
        return ", ".join([*parts, f"depth {self.depth}"] if self.depth else parts)


@dataclass(frozen=True, slots=True)
class RequestRecord(Record):
    """One answer. Times count from its arrival: when it was handed over, or when a Poisson arrival was due."""

    prompt: int  # which prompt of the kind
    prompt_tokens: int
    output_tokens: int
    latency_s: float  # whole answer
    ttft_s: float | None  # first token; None where the mode hands out whole answers
    gaps_ms: tuple[float, ...]  # between one arrival of tokens and the next; one arrival may bring several tokens
    finish_reason: str  # "stop" | "length" | "unknown"
    work: str  # short hash of the output ids
    arrival_s: float = 0.0  # since the cell, or its part, began


@dataclass(frozen=True, slots=True)
class StepCounts(Record):
    """Sums over the decoding steps of every request of a cell (a step of two requests counts twice), except for the
    fields on passes, which count each pass of the target once.

    committed = accepted + steps - truncated. Slot lists: drafted so far along, verified, verified with all slots
    before accepted, accepted. `histogram[n]`: steps in which n draft tokens were accepted, among steps with a draft.
    """

    steps: int
    draft_steps: int  # steps in which at least one draft token was verified
    drafted: int
    verified: int
    accepted: int
    committed: int
    truncated: int
    slot_drafted: tuple[int, ...]
    slot_verified: tuple[int, ...]
    slot_reached: tuple[int, ...]
    slot_accepted: tuple[int, ...]
    histogram: tuple[int, ...]
    sources: dict[str, int]  # steps by where their draft came from
    passes: int  # of the target, those with prompt tokens included
    pass_tokens: int
    pass_cached: int  # cached positions read, summed over passes and requests
    draft_ms: float  # of passes without prompt tokens
    verify_ms: float
    host_ms: float
    prefill_ms: float  # passes with prompt tokens, whole
    pass_sampled: int = 0  # positions whose logits were computed
    stated_count: tuple[int, ...] = ()  # verified slots by stated survival, ten equal bins; empty without confidences
    stated_sum: tuple[float, ...] = ()  # of the stated survivals in each bin
    stated_kept: tuple[int, ...] = ()  # how many of them survived

    def __add__(self, other: "StepCounts") -> "StepCounts":
        """Of both together."""
        return StepCounts(**{f.name: _sum(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})


def _sum(one: Any, other: Any) -> Any:
    """Of numbers; of lists place by place, the shorter one filled up with 0; of mappings key by key."""
    if isinstance(one, tuple):
        return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
    if isinstance(one, dict):
        return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
    return one + other


@dataclass(frozen=True, slots=True)
class Cell(Record):
    """One mode on one group in one round. `seconds`: from the first arrival to the last token, over all parts."""

    mode: str
    group: Group
    round: int
    seconds: float
    requests: tuple[RequestRecord, ...]
    counts: StepCounts | None = None  # None for other engines
    peak_memory_bytes: int | None = None  # of the process while it ran, where the system tells

    @property
    def tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Parting(Record):
    """First position at which an answer differs from plain's; `gap` and `noise` as in `dspark.measure.ties`."""

    prompt: int
    position: int
    gap: float | None  # None: one is the beginning of the other, or the scores could not be computed
    noise: float | None
    tie: bool


@dataclass(frozen=True, slots=True)
class Proof(Record):
    """Whether a mode's answers are plain's, prompt by prompt. `expected`: equality is promised (ours: greedy or
    seeded); for other engines it is only told."""

    mode: str
    group: Group
    expected: bool
    compared: int
    equal: int
    partings: tuple[Parting, ...] = ()

    @property
    def kept(self) -> bool:
        """Nothing differs but near-ties that rounding turned."""
        return all(parting.tie for parting in self.partings)


# What it says -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spread(Record):
    """Median and quartiles over rounds."""

    median: float
    low: float  # first quartile
    high: float  # third quartile
    rounds: int


@dataclass(frozen=True, slots=True)
class Quantiles(Record):
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Use(Record):
    """Of the machine while this mode ran: what the target's passes read and computed a second, and the share of the
    measured peaks that is."""

    bytes_per_s: float
    flop_per_s: float
    bytes_share: float | None
    flop_share: float | None


@dataclass(frozen=True, slots=True)
class Row(Record):
    """One mode on one group, over all rounds: what a report shows. See `metrics.DEFINITIONS` for every figure.

    `speedup` is over plain, round by round; `noise` is how far from 1 the control (plain over plain) strays in this
    group, and `verdict` is "faster", "slower" or "none" (inside the noise). The row of plain has speedup None.
    """

    mode: str
    group: Group
    tok_per_s: Spread
    tok_per_s_user: Spread
    speedup: Spread | None
    noise: float | None
    verdict: str | None
    requests: int
    tokens: int
    ttft_ms: Quantiles | None
    tpot_ms: Quantiles | None
    itl_ms: Quantiles | None
    latency_s: Quantiles
    acceptance_length: float | None
    acceptance_rate: float | None
    slot_marginal: tuple[float, ...]
    slot_conditional: tuple[float, ...]
    histogram: tuple[float, ...]  # shares; index = draft tokens accepted in a step with a draft
    draft_share: float | None  # of decoding time
    verify_share: float | None
    host_share: float | None
    sources: dict[str, float]  # shares of steps
    peak_memory_bytes: int | None
    use: Use | None
    equal: str  # "yes", "ties" (differs at near-ties only), "no", or "" where nothing was compared
    note: str = ""


@dataclass(frozen=True, slots=True)
class ControlSummary(Record):
    """Plain over plain, over all groups: `ratio` pools every round of every group; `restless` voids the run."""

    ratio: Spread
    spread: float  # interquartile range of the ratios
    limit: float  # spread or distance from 1 above which the run is restless
    restless: bool


@dataclass(frozen=True, slots=True)
class ReliabilityBin(Record):
    """Draft slots whose stated survival fell into one bin, by mode."""

    mode: str
    stated: float  # mean stated survival
    observed: float  # share that survived
    count: int


@dataclass(frozen=True, slots=True)
class BenchResult(Record):
    """A whole run. `skipped` says in sentences what was left out; `complete` is False after Ctrl-C."""

    settings: Settings
    machine: Machine
    target_name: str
    model: ModelSize | None
    version: str  # of this package
    command: str
    started: str  # ISO 8601, UTC
    seconds: float
    complete: bool
    cells: tuple[Cell, ...]
    rows: tuple[Row, ...]
    control: ControlSummary | None
    proofs: tuple[Proof, ...]
    notes: dict[str, str] = field(default_factory=dict)  # by mode: what a reader has to know about it
    skipped: tuple[str, ...] = ()
    reliability: tuple[ReliabilityBin, ...] = ()

    def write(self, path: Path) -> None:
        """Raises DataError when the file cannot be written."""
        try:
            with replacing(path) as part:
                text = json.dumps({"format": FORMAT, "format_version": VERSION, **self.to_dict()}, allow_nan=False)
                part.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise DataError(f"{path} cannot be written ({error.strerror or error}); choose another --out.") from None

    @classmethod
    def read(cls, path: Path) -> "BenchResult":
        """Raises DataError when the file is missing, something else, or of another version."""
        again = "write one with dspark bench"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror or error}); {again}.") from None
        except ValueError:
            raise DataError(f"{path} is not JSON; {again}.") from None
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise DataError(f"{path} is not a benchmark result; {again}.")
        if (version := values.pop("format_version", None)) != VERSION:
            raise DataError(f"{path} has version {version}; this dspark reads version {VERSION}: {again}.")
        return cls.from_dict(values)
