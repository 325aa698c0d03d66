"""Options that several commands share, and what they build."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.errors import DsparkError

if TYPE_CHECKING:
    from dspark.engine import Engine

Model = Annotated[str, typer.Option("--model", "-m", help="Alias (smollm2), Hugging Face folder, GGUF file or hub id.")]
Drafter = Annotated[str, typer.Option(help="auto (the one made for this model, if any), none, or a drafter folder.")]
CorpusTable = Annotated[
    str, typer.Option(help="What lookup drafts from beside the text itself: auto (a table that fits), none or a file.")
]
Proposer = Annotated[str, typer.Option(help="Where drafts come from: auto, none, lookup, dspark or model:PATH.")]
Policy = Annotated[
    str, typer.Option(help="How much to draft and verify: fixed:N, length, history, threshold:c, scheduled, auto.")
]
Profile = Annotated[
    str,
    typer.Option(
        envvar="DSPARK_PROFILE",
        help="What passes cost on this machine: auto (measured when first needed, then kept), none, or a profile.json.",
    ),
]
System = Annotated[str | None, typer.Option(help="System message; default is the model's own.")]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to answer with.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability; 1 is off.")]
TopK = Annotated[int, typer.Option(help="Keep this many likeliest tokens; 0 is off.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this fraction of the likeliest; 0 is off.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 discourages tokens seen before; 1 is off.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampled text repeatable, whatever drafts it.")]
Exact = Annotated[
    bool, typer.Option("--exact", help="Bitwise the same numbers whatever shares the pass (CPU); slower plain steps.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float16, bfloat16, float32 or float64.")]
KvGb = Annotated[float, typer.Option(help="Gigabytes for keys and values.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads; default is torch's own choice.")]


def load_engine(**settings: Any) -> "Engine":
    """An engine from command-line settings. torch is imported here, not when `--help` is asked for."""
    from dspark import Engine

    try:
        return Engine.from_pretrained(**settings)
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for a CPU allocation that failed.
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        raise DsparkError("There is not enough memory for this model; lower --kv-gb or use a smaller model.") from None
