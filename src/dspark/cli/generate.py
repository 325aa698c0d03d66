"""`dspark generate`: one prompt, one streamed answer."""

import secrets
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.cli import options
from dspark.errors import RequestError

if TYPE_CHECKING:
    from dspark.config import SamplingParams
    from dspark.engine import Engine, Output


def generate(
    prompt: Annotated[str, typer.Argument(help="The question; - reads it from standard input.")],
    model: options.Model = "smollm2",
    drafter: options.Drafter = "auto",
    proposer: options.Proposer = "auto",
    corpus_table: options.CorpusTable = "auto",
    policy: options.Policy = "auto",
    profile: options.Profile = "auto",
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: options.System = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour accepted, recovered and bonus tokens.")
    ] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print acceptance and the time split.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Decode again without drafts: are the answers equal, how much faster?")
    ] = False,
    exact: options.Exact = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kv_gb: options.KvGb = 1.0,
    threads: options.Threads = None,
) -> None:
    """Answer one prompt, streamed.

    Examples:

    \b
    dspark generate "Write a Python function that adds two numbers." --show-drafts --stats
    dspark generate --compare --temperature 0.7 --seed 1 "Tell me a story."
    cat notes.txt | dspark generate --raw --max-tokens 64 -
    """
    text = _read_stdin() if prompt == "-" else prompt
    if not text.strip():
        raise RequestError("The prompt is empty; write a question, or pipe text in with -.")
    if compare and temperature > 0 and seed is None:
        seed = secrets.randbits(31)  # two samplings can only be equal with the same seed
    from dspark import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    engine = options.load_engine(
        model=model,
        drafter=drafter,
        proposer=proposer,
        corpus_table=corpus_table,
        policy=policy,
        profile=profile,
        exact=exact,
        device=device,
        dtype=dtype,
        kv_gb=kv_gb,
        threads=threads,
    )
    messages = [{"role": "system", "content": system}] if system else []
    ids = (
        engine.target.tokenizer.encode(text) if raw else engine.chat_ids([*messages, {"role": "user", "content": text}])
    )
    _answer(engine, ids, params, show_drafts, stats, compare)


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise RequestError("The prompt on standard input is not UTF-8; convert it to UTF-8 first.") from None


def _answer(
    engine: "Engine", ids: list[int], params: "SamplingParams", colours: bool, stats: bool, compare: bool
) -> None:
    from dspark.cli.show import LEGEND, err, show_stats, show_stream

    began = time.perf_counter()
    output = show_stream(engine.stream(ids, params), colours)
    seconds = time.perf_counter() - began
    if output is None:
        raise typer.Exit(130)
    if output.error:
        raise RequestError(output.error)
    if colours:
        err.print(LEGEND)
    if stats:
        show_stats(output.stats, seconds)
    if compare:
        _compare(engine, output, params, seconds)


def _compare(engine: "Engine", output: "Output", params: "SamplingParams", seconds: float) -> None:
    """Decode the same prompt with nothing proposed, and say whether the ids are the same."""
    from dspark.cli.show import err

    plain_engine = engine.without_drafts()
    began = time.perf_counter()
    plain = plain_engine.generate([output.prompt_ids], params)[0]
    plain_seconds = time.perf_counter() - began
    equal = plain.token_ids == output.token_ids
    verdict = "equal to" if equal else "[red]different from[/]"
    seed = "" if params.seed is None else f" (seed {params.seed})"
    err.print(
        f"{len(output.token_ids)} tokens, {verdict} plain decoding{seed}; {seconds:.2f} s against "
        f"{plain_seconds:.2f} s plain, {plain_seconds / seconds:.2f}x, one run each."
    )
    if not equal:
        at = next((i for i, (a, b) in enumerate(zip(output.token_ids, plain.token_ids, strict=False)) if a != b), 0)
        err.print(
            f"They part at token {at}. Without --exact, passes of different sizes round differently, which can turn "
            "a near-tie; with --exact there is no difference."
        )
