"""What a mode's spelling means: our proposers and policies, and other engines."""

import importlib.util
from dataclasses import dataclass

from dspark.config.settings import MODEL_PROPOSER, PROPOSERS
from dspark.errors import SettingsError
from dspark.measure.bench.records import CONTROL, PLAIN
from dspark.schedule import check_policy
from dspark.schedule.policy import POLICIES

RANDOM = "-random"  # after dspark or auto: with a drafter of random weights
# engine -> (module it needs, its package, how to install it)
_TRANSFORMERS = ("transformers", "transformers", "pip install 'dspark[transformers]'")
_LLAMA_CPP = ("llama_cpp", "llama-cpp-python", "pip install 'dspark[llama]'")
ENGINES = {
    "transformers": _TRANSFORMERS,
    "transformers-lookup": _TRANSFORMERS,
    "transformers-assisted": _TRANSFORMERS,
    "llama.cpp": _LLAMA_CPP,
    "llama.cpp-lookup": _LLAMA_CPP,
    "vllm": ("vllm", "vllm", "pip install vllm"),
    "openai": ("httpx", "httpx", "pip install httpx"),
}
SPELLINGS = (
    "plain, PROPOSER or PROPOSER/POLICY (lookup/fixed:4, dspark/auto, auto/auto, model:PATH, dspark-random/auto), "
    "transformers, transformers-lookup, transformers-assisted:PATH, llama.cpp, llama.cpp:GGUF, llama.cpp-lookup, "
    "vllm, openai:URL"
)
BASELINES = ("transformers", "transformers-lookup", "llama.cpp", "llama.cpp-lookup", "vllm")


@dataclass(frozen=True, slots=True)
class Mode:
    """`engine` is "ours" or a key of `ENGINES`. Ours have a proposer, maybe a policy, and maybe random drafts; others
    may have an argument (a model's path, a server's address)."""

    name: str
    engine: str
    proposer: str = "none"
    policy: str | None = None
    random: bool = False
    argument: str = ""


def parse_mode(text: str) -> Mode:
    """Raises SettingsError when the spelling is unknown or incomplete."""
    if text in (PLAIN, CONTROL, "none"):
        return Mode(PLAIN if text == "none" else text, "ours")
    engine, colon, argument = text.partition(":")
    if engine in ENGINES:
        _check_argument(text, engine, colon, argument)
        return Mode(text, engine, argument=argument)
    proposer, policy = _split(text)
    plain_name = proposer.removesuffix(RANDOM)
    random = plain_name != proposer and plain_name in ("dspark", "auto")
    proposer = plain_name if random else proposer
    known = proposer.startswith(MODEL_PROPOSER) or (proposer in PROPOSERS and proposer != "none")
    if not known or proposer == MODEL_PROPOSER:
        raise SettingsError(f"mode is {text!r}; allowed are {SPELLINGS}.")
    if policy is not None:
        check_policy(policy)
    return Mode(text, "ours", proposer, policy, random)


def parse_modes(names: list[str]) -> list[Mode]:
    """All modes of a run: plain first, its control second, then the others, each once.

    Raises:
        SettingsError: a spelling is unknown.
    """
    others = [mode for mode in map(parse_mode, names) if mode.name not in (PLAIN, CONTROL)]
    every = [parse_mode(PLAIN), parse_mode(CONTROL), *others]
    return list({mode.name: mode for mode in every}.values())


def missing(mode: Mode) -> str | None:
    """Why a mode cannot run here, as a clause; None when its package is installed."""
    if mode.engine == "ours":
        return None
    module, package, install = ENGINES[mode.engine]
    if importlib.util.find_spec(module) is not None:
        return None
    return f"needs the package {package}, which is not installed ({install})"


def check_installed(mode: Mode) -> None:
    """Raises SettingsError when the mode's package is missing."""
    if why := missing(mode):
        raise SettingsError(f"mode {mode.name!r} {why}; install it, or leave the mode out.")


def _check_argument(text: str, engine: str, colon: str, argument: str) -> None:
    needs, takes = engine in ("transformers-assisted", "openai"), engine in ("llama.cpp", "llama.cpp-lookup")
    if needs and not argument:
        what = "the smaller model's PATH" if engine == "transformers-assisted" else "the server's URL"
        raise SettingsError(f"mode is {text!r}; write {engine}: and {what}.")
    if colon and not (needs or takes) or colon and not argument:
        raise SettingsError(f"mode is {text!r}; {engine} takes nothing after it, write {engine}.")


def _split(text: str) -> tuple[str, str | None]:
    """Proposer and policy; a path in `model:PATH` has slashes of its own."""
    proposer, slash, policy = text.rpartition("/")
    if not slash:
        return text, None
    named = policy.partition(":")[0] in {known.partition(":")[0] for known in POLICIES}
    if proposer.startswith(MODEL_PROPOSER) and not named:
        return text, None
    return proposer, policy
