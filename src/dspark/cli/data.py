"""`dspark data`: what a drafter learns from: prompts, responses, and a look at both."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import options
from dspark.errors import SettingsError

if TYPE_CHECKING:
    from dspark.data import Described, Endpoint, Prompt, RespondPlan, SynthPlan
    from dspark.data.prompts import Chooser
    from dspark.engine import Engine

app = typer.Typer(
    help="Make and look at training data: the target's own text.", no_args_is_help=True, rich_markup_mode=None
)

Target = Annotated[
    str, typer.Option("--target", "-m", help="Alias (smollm2), Hugging Face folder, GGUF file or hub id.")
]
Seed = Annotated[int, typer.Option(help="Decides every draw; the same seed gives the same file.")]
Batch = Annotated[int, typer.Option(help="Requests decoded together.")]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact/--no-exact",
        help="The same text whatever shares a pass, so that a resumed run equals an uninterrupted one; default on CPU.",
        show_default=False,
    ),
]


@app.command("synth")
def synth(
    out: Annotated[Path, typer.Option(help="The JSONL file to write.")],
    count: Annotated[int, typer.Option(help="Prompts to make, spread evenly over the kinds.")],
    target: Target = "smollm2",
    kinds: Annotated[
        str | None, typer.Option(help="code, math, chat, writing, extraction, translation; default all of them.")
    ] = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 0.95,
    max_tokens: Annotated[int, typer.Option(help="Longer prompts are thrown away.")] = 256,
    seed: Seed = 0,
    batch: Batch = 32,
    proposer: options.Proposer = "auto",
    drafter: options.Drafter = "auto",
    exact: Exact = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kv_gb: options.KvGb = 1.0,
    threads: options.Threads = None,
) -> None:
    """Let the target write prompts: it continues short openings of user turns.

    Duplicates, near-duplicates, loops, cut-off and unprintable ones are thrown away. A run may be killed at any
    moment; the same command goes on where it stopped and ends with the same file.

    Examples:

    \b
    dspark data synth --count 2000 --out prompts.jsonl
    dspark data synth --count 500 --kinds code,math --seed 7 --out more.jsonl
    """
    from dspark.cli.show import err
    from dspark.data import Described, SynthPlan, parse_kinds, prompts_written

    plan = SynthPlan(count, parse_kinds(kinds), temperature, top_p, max_tokens, seed)
    exact = _exact(exact, device)
    settings = plan.settings(Described.load(target), dtype, exact)
    if prompts_written(out, settings):
        _say_complete(out)
        return
    engine = _engine(target, batch, proposer, drafter, exact, device, dtype, kv_gb, threads)
    chooser = _synthesise(engine, plan, settings, out)
    rejected = ", ".join(f"{number} {why}" for why, number in chooser.rejected.most_common()) or "none"
    err.print(f"{len(chooser.chosen)} prompts are in {out}; thrown away: {rejected}.")
    for kind, missing in chooser.shortfall().items():
        err.print(f"Kind {kind} is {missing} short, because the target repeats itself; raise --temperature for more.")


@app.command("respond")
def respond(
    prompts: Annotated[
        list[str], typer.Option(help="JSONL file, folder of them, or hf:owner/name; may be given several times.")
    ],
    out: Annotated[Path, typer.Option(help="The packed file (.npz), or a folder for it.")],
    target: Target = "smollm2",
    temperatures: Annotated[str, typer.Option(help="Each prompt gets one of these.")] = "0,0.7,1.0",
    weights: Annotated[str | None, typer.Option(help="How often each temperature is taken; default equally.")] = None,
    top_p: options.TopP = 1.0,
    max_tokens: options.MaxTokens = 512,
    system: options.System = None,
    seed: Seed = 0,
    limit: Annotated[int | None, typer.Option(help="Prompts taken from each source; default all.")] = None,
    split: Annotated[str, typer.Option(help="Split of a data set.")] = "train",
    subset: Annotated[str | None, typer.Option(help="Subset (configuration) of a data set.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="OpenAI-compatible server, such as http://localhost:8000/v1; the same model.")
    ] = None,
    endpoint_model: Annotated[str | None, typer.Option(help="The server's name for the model.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="Environment variable that holds the server's key.")] = None,
    batch: Batch = 32,
    proposer: options.Proposer = "auto",
    drafter: options.Drafter = "auto",
    exact: Exact = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kv_gb: options.KvGb = 1.0,
    threads: options.Threads = None,
) -> None:
    """Let the target answer prompts, and pack its answers for training.

    Prompts are OpenAI messages, ShareGPT conversations, plain prompts or turns. A run may be killed at any moment; the
    same command goes on where it stopped, no finished answer is computed again, and the file is the same.

    With --endpoint another server generates; it must serve the very same model, which nobody can check from here.

    Examples:

    \b
    dspark data respond --prompts prompts.jsonl --out data/first.npz
    dspark data respond --prompts hf:owner/name --limit 5000 --temperatures 0,1 --weights 1,2 --out data/hub.npz
    dspark data respond --prompts prompts.jsonl --endpoint http://localhost:8000/v1 --endpoint-model m --out data/
    """
    from dspark.cli.show import err
    from dspark.data import Described, RespondPlan, read_prompts, responses_written

    plan = RespondPlan(*_mix(temperatures, weights), top_p, max_tokens, seed, system)
    server = _server(endpoint, endpoint_model, api_key_env, batch)
    if limit is not None and limit < 1:
        raise SettingsError(f"--limit is {limit}; allowed is 1 or more.")
    out = out if out.suffix == ".npz" else out / "responses.npz"
    exact = _exact(exact, device)
    described = Described.load(target)
    several = read_prompts(prompts, limit, split, subset)
    made_by = {"endpoint_model": server.model} if server else {"dtype": dtype, "exact": exact}
    settings = plan.settings(several, described, **made_by)
    if responses_written(out, settings):
        _say_complete(out)
        return
    source = server or _engine(target, batch, proposer, drafter, exact, device, dtype, kv_gb, threads)
    for note in _respond(source, several, plan, settings, described, out):
        err.print(note)
    _show_files([out], described)


@app.command("inspect")
def inspect(
    files: Annotated[list[Path], typer.Argument(help="Packed token files.")],
    target: Target = "smollm2",
    show: Annotated[int, typer.Option(help="Print this many sequences as text.")] = 0,
) -> None:
    """Say what packed files hold, per kind of text and temperature.

    prompt and response are counts of tokens; mean and p90 are response lengths; loops is the share of responses that
    begin to repeat themselves; covered is the share of response tokens among the 8192 most frequent ones, which is what
    a drafter with that draft vocabulary can propose; repeats counts texts whose prompt stands earlier already.

    Examples:

    \b
    dspark data inspect data/*.npz
    dspark data inspect data/first.npz --show 3
    """
    if show < 0:
        raise SettingsError(f"--show is {show}; allowed is 0 or more.")
    from dspark.data import Described

    _show_files(files, Described.load(target), show)


def _exact(asked: bool | None, device: str) -> bool:
    from dspark.engine.setup import pick_device

    return pick_device(device).type == "cpu" if asked is None else asked


def _engine(
    target: str,
    batch: int,
    proposer: str,
    drafter: str,
    exact: bool,
    device: str,
    dtype: str,
    kv_gb: float,
    threads: int | None,
) -> "Engine":
    return options.load_engine(
        model=target,
        max_batch=batch,
        proposer=proposer,
        drafter=drafter,
        exact=exact,
        device=device,
        dtype=dtype,
        kv_gb=kv_gb,
        threads=threads,
    )


def _mix(temperatures: str, weights: str | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Temperatures and how often each is taken."""
    several = _numbers("--temperatures", temperatures)
    return several, (1.0,) * len(several) if weights is None else _numbers("--weights", weights)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(f"{name} is {text!r}; give numbers with commas between, such as 0,0.7,1.") from None


def _server(url: str | None, model: str | None, api_key_env: str | None, parallel: int) -> "Endpoint | None":
    """The endpoint asked for, if any."""
    if url is None:
        if model is not None or api_key_env is not None:
            raise SettingsError("--endpoint-model and --api-key-env belong to --endpoint; give that too.")
        return None
    if model is None:
        raise SettingsError("--endpoint needs --endpoint-model, the server's name for the model.")
    if api_key_env is not None and api_key_env not in os.environ:
        raise SettingsError(f"--api-key-env is {api_key_env} and there is no such environment variable; set it.")
    from dspark.data import Endpoint

    return Endpoint(url, model, os.environ[api_key_env] if api_key_env else None, parallel)


def _say_complete(out: Path) -> None:
    from dspark.cli.show import err

    err.print(f"{out} is complete: an earlier run with the same settings wrote it.")


def _synthesise(engine: "Engine", plan: "SynthPlan", settings: dict[str, Any], out: Path) -> "Chooser":
    from dspark.cli.watch import watch
    from dspark.data import Journal, choose, journal_path, synthesise, write_prompts

    with Journal(journal_path(out), settings) as journal:
        done = choose(plan, journal).filled
        watch(synthesise(engine, plan, journal), "prompts", done, plan.count)
        chooser = write_prompts(out, plan, settings, journal)
        journal.remove()
    return chooser


def _respond(
    source: "Engine | Endpoint",
    prompts: "list[Prompt]",
    plan: "RespondPlan",
    settings: dict[str, Any],
    target: "Described",
    out: Path,
) -> tuple[str, ...]:
    """Generate what is missing and pack it; notes about what was left out."""
    from dspark.cli.watch import watch
    from dspark.data import Endpoint, Journal, journal_path, pack_responses, respond, respond_by_endpoint, tokenise

    context = target.spec.context if isinstance(source, Endpoint) else source.context
    tokenised = tokenise(prompts, plan, target, context)
    with Journal(journal_path(out), settings) as journal:
        if isinstance(source, Endpoint):
            reports = respond_by_endpoint(source, prompts, tokenised, plan, journal, target)
        else:
            reports = respond(source, tokenised, plan, journal)
        watch(reports, "responses", len(journal.entries) + len(tokenised.too_long), len(prompts))
        notes = pack_responses(out, prompts, plan, settings, journal, target)
        journal.remove()
    return notes


def _show_files(files: list[Path], target: "Described", show: int = 0) -> None:
    from dspark.cli.data_show import show_groups, show_provenance, show_texts
    from dspark.cli.show import err
    from dspark.data import read_corpus, summarise

    corpus = read_corpus(files, target.spec.vocab_size, target.spec.context, target.fingerprint)
    for note in corpus.notes:
        err.print(note)
    show_provenance(files)
    show_groups(summarise(corpus))
    show_texts(corpus, target.tokenizer, show)
