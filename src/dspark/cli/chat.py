"""`dspark chat`: a conversation at the terminal."""

from typing import Annotated

import typer

from dspark.cli import options
from dspark.errors import RequestError


def chat(
    model: options.Model = "smollm2",
    drafter: options.Drafter = "auto",
    proposer: options.Proposer = "auto",
    corpus_table: options.CorpusTable = "auto",
    policy: options.Policy = "auto",
    profile: options.Profile = "auto",
    system: options.System = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour accepted, recovered and bonus tokens.")
    ] = False,
    exact: options.Exact = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kv_gb: options.KvGb = 1.0,
    threads: options.Threads = None,
) -> None:
    """Talk with a model. /reset starts over, /exit or Ctrl-D leaves, Ctrl-C cuts an answer short.

    Examples:

    \b
    dspark chat
    dspark chat --model ./my-model --system "Answer in one sentence." --temperature 0.7
    """
    from dspark import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_tokens=max_tokens,
        seed=seed,
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
    from dspark.cli.show import err, show_stream

    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        except UnicodeDecodeError:
            err.print("This line is not UTF-8; type it again.")
            continue
        if question == "/exit":
            return
        if question == "/reset":
            messages = list(start)
        elif question:
            asked = [*messages, {"role": "user", "content": question}]
            try:
                output = show_stream(engine.stream(engine.chat_ids(asked), params), show_drafts)
            except RequestError as error:
                err.print(f"{error} Or type /reset.", markup=False)
                continue
            if output is not None:
                messages = [*asked, {"role": "assistant", "content": output.text}]
