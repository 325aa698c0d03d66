"""The automatic profile: what passes, drafts and the work around them cost here, measured once and kept.

A job runs one pass or one step and says how long it took. All jobs take turns, round after round, so that a slow moment
of the machine hits all of them alike and can be taken out. Small passes, between which plans choose most often, are in
every round; the longer a job, the rarer it is.
"""

import datetime
import hashlib
import logging
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from dspark.artifacts import cache_dir
from dspark.artifacts.profile import ProfileKey, StoredProfile, profile_path, read_profile, write_profile
from dspark.config import Draft, EngineConfig, SamplingParams, StepRecord, Streams
from dspark.engine.auto_proposer import AutoProposer
from dspark.engine.batcher import Row
from dspark.engine.proposer import Proposer, StatelessProposer, point_masses
from dspark.errors import CacheError, ProfileError
from dspark.schedule.policy import MAX_DRAFT
from dspark.schedule.profile import Profile
from dspark.schedule.profile_fit import DraftPoint, HostPoint, PassPoint, fit_profile, residual, steady_medians
from dspark.target import PassRow, Target
from dspark.target.kv import KEY_BLOCK, round_up
from dspark.target.linear import resolve_dtype

logger = logging.getLogger("dspark")

TOKENS = (*range(1, 17), 20, 24, 28, 32, 48, 64, 96, 128, 192, 256, 512)
ROWS = (1, 2, 4, 8, 16, 32)
ATTENTION_TOKENS = (1, 2, 4, 8, 16)  # of one request, at the far context
BASE_CONTEXT, FAR_CONTEXT = 64, 2048
HELD_OUT = ((8, 2, 512), (16, 4, 512), (24, 4, 64), (12, 1, 1024))  # points the fit does not see
GUESSES = 4  # tokens a draft has where no model drafts
BUDGET_S = 20.0
MOST_ROUNDS = 36
EVERY = ((32, 1), (128, 4))  # a pass of so many tokens takes part in every so many rounds
RARE = 8
UNSURE = 0.15  # median error on held-out points above which a profile says little
_PROMPT_TOKENS = 3  # of requests that decode a single step
_SLOTS = 2304  # of the pool that passes are timed on: one request at the far context, or 32 at the base


class Steps(Protocol):
    """What measuring needs of an engine."""

    def add(self, prompt: Sequence[int], params: SamplingParams) -> int: ...

    def step(self) -> StepRecord | None: ...

    def abort(self, request_id: int) -> Any: ...


OpenEngine = Callable[[Target, Proposer, EngineConfig], Steps]
Point = tuple[str, tuple[Any, ...]]  # kind ("pass", "draft", "host"), and the kind's point


@dataclass(frozen=True)
class Job:
    """`run` measures some points once, in ms; it takes part in every `every`-th round."""

    run: Callable[[], dict[Point, float]]
    every: int = 1


def needs_costs(config: EngineConfig, proposer: Proposer) -> bool:
    """Whether something is to be decided by what it costs: how much to draft, or whether lookup or a model does."""
    plans = config.policy in ("scheduled", "auto") and proposer.most > 0
    return config.profile != "none" and (plans or isinstance(proposer, AutoProposer))


def load_or_measure(
    target: Target, proposer: Proposer, config: EngineConfig, open_engine: OpenEngine, path: Path | None = None
) -> Profile:
    """What passes cost here, for a plan; see `stored_profile`."""
    return Profile.from_dict(stored_profile(target, proposer, config, open_engine, path).costs)


def stored_profile(
    target: Target,
    proposer: Proposer,
    config: EngineConfig,
    open_engine: OpenEngine,
    path: Path | None = None,
    force: bool = False,
) -> StoredProfile:
    """The profile of this target, proposer, machine and setting: from the cache, or measured now and cached.

    `open_engine` is `Engine`, which this module cannot import. The proposer's pool is opened anew here, so an engine
    that uses the proposer is built afterwards. With `path` the profile is read from there and nothing is measured.

    Raises:
        ProfileError: the profile at `path` is missing, damaged or was measured elsewhere.
    """
    key = profile_key(target, proposer, config)
    if path is not None:
        return checked(path, read_profile(path, key))
    path = profile_path(key)
    stale = stale_mark(path)
    if stale.exists():
        logger.info("Steps no longer took what the profile of %s says, so it is measured again.", target.name)
    elif path.exists() and not force:
        try:
            return checked(path, read_profile(path, key))
        except ProfileError as error:  # ours to mend: nobody asked for this file
            logger.warning("%s", error)
    logger.info("Measuring what passes of %s cost on this machine (about %.0f s, once).", target.name, BUDGET_S)
    stored = measure(target, proposer, config, open_engine, key, BUDGET_S)
    try:
        write_profile(path, stored)
        stale.unlink(missing_ok=True)
    except CacheError as error:  # decoding goes on without
        logger.warning("%s", error)
    logger.info(
        "Measured in %.0f s, to within %.0f %%; kept in %s.", stored.seconds, 100 * stored.residual, cache_dir()
    )
    if stored.residual > UNSURE:
        logger.warning(
            "These costs are not sure, probably because of other work on the machine; measure again when it is quiet, "
            "with dspark profile --force."
        )
    return stored


def stale_mark(path: Path) -> Path:
    """The file whose being there says that a cached profile is to be measured anew."""
    return path.with_suffix(".stale")


def mark_stale(key: ProfileKey) -> None:
    """Have the next start measure this profile anew; the running engine goes on with corrected costs, since measuring
    would hold its requests up. Says so once, and stops nothing where the cache cannot be written."""
    logger.info(
        "Steps here no longer take what the profile says; plans are corrected, and the next start measures again."
    )
    path = profile_path(key)
    try:
        if path.exists():
            stale_mark(path).touch()
    except OSError as error:
        logger.warning("%s cannot be marked (%s); measure with dspark profile --force.", path, error.strerror or error)


def checked(path: Path, stored: StoredProfile) -> StoredProfile:
    """The same, once its costs are known to be a profile. Raises ProfileError, naming the file."""
    try:
        Profile.from_dict(stored.costs)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None
    return stored


def profile_key(target: Target, proposer: Proposer, config: EngineConfig) -> ProfileKey:
    """What the costs of this engine depend on."""
    from dspark import __version__

    device = target.decoder.device
    return ProfileKey(
        target=target.fingerprint.weights,
        drafter=drafter_digest(proposer),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        cpu=cpu_model(),
        dtype=resolve_dtype(config.dtype, device),
        exact=target.decoder.exact,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        dspark=__version__,
    )


def drafter_of(proposer: Proposer) -> Proposer | None:
    """The part that runs a model of its own, if any; lookups cost next to nothing."""
    own = proposer.neural if isinstance(proposer, AutoProposer) else proposer
    return None if own.shape is None else own


def drafter_digest(proposer: Proposer) -> str:
    """Tells apart what costs differently; the same shape trained anew costs the same. "" without a model."""
    own = drafter_of(proposer)
    return "" if own is None else hashlib.sha256(repr((own.name, own.taps, own.shape)).encode()).hexdigest()[:16]


def cpu_model() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# Measuring ----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def measure(
    target: Target,
    proposer: Proposer,
    config: EngineConfig,
    open_engine: OpenEngine,
    key: ProfileKey,
    budget_s: float,
) -> StoredProfile:
    """Measure everything, now; longer than `budget_s` only where once through all takes longer."""
    began = time.perf_counter()
    drafter = drafter_of(proposer)
    block = min(MAX_DRAFT, drafter.most) if drafter else GUESSES
    jobs = [*pass_jobs(target, proposer.taps), *step_jobs(target, drafter, config, open_engine, block)]
    costs, errors = take_turns(jobs, budget_s)
    passes: dict[PassPoint, float] = _of_kind(costs, "pass")
    drafts: dict[DraftPoint, float] = _of_kind(costs, "draft") if drafter else {}
    drafts = {point: ms for point, ms in drafts.items() if point[1]}
    hosts: dict[HostPoint, float] = _of_kind(costs, "host")
    held_out = {point: passes.pop(point) for point in HELD_OUT if point in passes}
    profile = fit_profile(passes, drafts, hosts, block, _of_kind(errors, "pass"))
    return StoredProfile(
        key=key,
        costs=profile.to_dict(),
        target_name=target.name,
        drafter_name=(drafter or proposer).name,
        measured=datetime.datetime.now(datetime.UTC).date().isoformat(),
        seconds=time.perf_counter() - began,
        residual=residual(profile, held_out),
    )


def take_turns(jobs: Sequence[Job], budget_s: float) -> tuple[dict[Point, float], dict[Point, float]]:
    """Rounds over all jobs until the time is up, every job at least once; the steady median of every point, and its
    standard error as a share.

    The first run of each is cold, and counts only where there is no other.
    """
    began = time.perf_counter()
    cold = {point: ms for job in jobs for point, ms in job.run().items()}
    samples: list[tuple[Point, float]] = []
    for number in range(MOST_ROUNDS):
        for index, job in enumerate(jobs):
            # Rarer jobs are spread over the rounds.
            if number % job.every == index % job.every and time.perf_counter() - began < budget_s:
                samples += job.run().items()
    medians, errors = steady_medians(samples)
    return cold | medians, errors


def pass_jobs(target: Target, taps: Sequence[int]) -> Iterator[Job]:
    """Target passes: tokens over one request, requests of one token each, attention over a far context, held out."""
    longest = target.spec.context
    base, far = min(BASE_CONTEXT, longest // 4), min(FAR_CONTEXT, longest - max(ATTENTION_TOKENS))
    passes = _Passes(target, taps)
    points: list[PassPoint] = [(tokens, 1, base) for tokens in TOKENS if base + tokens <= longest]
    points += [(rows, rows, base) for rows in ROWS[1:]]
    points += [(tokens, 1, far) for tokens in ATTENTION_TOKENS if far > base]
    points += [(tokens, rows, context) for tokens, rows, context in HELD_OUT if context + tokens <= longest]
    for point in points:
        every = next((rounds for tokens, rounds in EVERY if point[0] <= tokens), RARE)
        every = every if point[2] == base and point not in HELD_OUT else max(every, 4)
        yield Job(lambda point=point: {("pass", point): passes.run(*point)}, every)  # type: ignore[misc]


class _Passes:
    """Target passes over a pool whose pages were all written: unwritten ones would read as if cached."""

    def __init__(self, target: Target, taps: Sequence[int]):
        self._decoder, self._taps = target.decoder, taps
        self._pool = self._decoder.new_pool(_SLOTS + KEY_BLOCK)  # exact mode reads whole key blocks
        for cache in self._pool.caches:
            cache.fill_(0.5)

    def run(self, tokens: int, rows: int, context: int) -> float:
        """One pass of `tokens` tokens, spread evenly over `rows` requests with `context` cached positions; ms."""
        counts = [tokens // rows + (row < tokens % rows) for row in range(rows)]
        stride = _SLOTS // rows
        layout = [PassRow(row * stride, context, count) for row, count in enumerate(counts)]
        assert context + max(counts) <= stride
        ids = torch.arange(tokens, device=self._decoder.device) % self._decoder.spec.vocab_size
        self._wait()
        began = time.perf_counter()
        hidden, _ = self._decoder.run(ids, layout, self._pool, self._taps)
        self._decoder.logits(hidden)
        self._wait()
        return (time.perf_counter() - began) * 1e3

    def _wait(self) -> None:
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize(self._decoder.device)


def step_jobs(
    target: Target, drafter: Proposer | None, config: EngineConfig, open_engine: OpenEngine, block: int
) -> Iterator[Job]:
    """Engine steps, for what they spend outside the target's pass: plain, with one and `block` drafted tokens, and
    sampled at temperature 1."""
    proposer = drafter or _Guesses()
    token_bytes = target.decoder.kv_token_bytes + proposer.kv_token_bytes
    each = round_up(_PROMPT_TOKENS + block + 2 + proposer.slack, KEY_BLOCK)
    settings = replace(
        config,
        policy=f"fixed:{block}",
        kv_gb=(max(ROWS) + 1) * each * token_bytes / 1e9,
        prefix_cache=False,
        max_batch=max(ROWS),
        max_pass_tokens=512,
        context=None,
    )
    steps = _EngineSteps(open_engine(target, proposer, settings), target.spec.vocab_size)
    points: list[DraftPoint] = [(rows, 0, False) for rows in (1, 8, 32)]
    points += [
        (rows, slots, sampled) for rows in (1, 8) for slots, sampled in ((0, True), (block, False), (block, True))
    ]
    points += [(rows, 1, False) for rows in ROWS if drafter]
    for point in dict.fromkeys(points):
        every = 3 if point[0] <= 8 else 6  # rows
        yield Job(lambda point=point: steps.run(*point), every)  # type: ignore[misc]


class _Guesses(StatelessProposer):
    """Drafts of arbitrary tokens, so that steps with drafts can be timed without a drafter."""

    name = "guesses"

    def propose(self, rows: Sequence[Row], lens: Sequence[int], streams: Streams) -> Draft:
        return point_masses([range(1, 1 + n) for n in lens], self.name)


class _EngineSteps:
    """Single decoding steps of fresh requests."""

    def __init__(self, engine: Steps, vocab_size: int):
        self._engine, self._vocab_size = engine, vocab_size

    def run(self, rows: int, slots: int, sampled: bool) -> dict[Point, float]:
        """One step in which each of `rows` requests drafts `slots` tokens; its draft and host time in ms.

        A request that may still commit one token is never drafted for more than that, which fixes the draft's length.
        """
        params = SamplingParams(temperature=float(sampled), max_tokens=slots + 2, ignore_eos=True)
        prompts = [[(7 * row + i) % self._vocab_size for i in range(_PROMPT_TOKENS)] for row in range(rows)]
        ids = [self._engine.add(prompt, params) for prompt in prompts]
        try:
            self._engine.step()  # the prompts, and the first token of each
            record = self._engine.step()
        finally:
            for request_id in ids:
                self._engine.abort(request_id)
        assert record is not None and [row.drafted for row in record.rows] == [slots] * rows
        point = (rows, slots, sampled)
        return {("draft", point): record.times.draft_ms, ("host", point): record.times.host_ms}


def _of_kind(costs: dict[Point, float], kind: str) -> dict[Any, float]:
    return {point: ms for (found, point), ms in costs.items() if found == kind}
