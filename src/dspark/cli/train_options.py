"""Options of `dspark train` and `dspark estimate`, and what is checked before anything is loaded."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.errors import SettingsError

Data = Annotated[list[Path], typer.Option(help="Packed token files; more may follow, or repeat the option.")]
More = Annotated[list[Path] | None, typer.Argument(help="More data files.", show_default=False)]
Out = Annotated[Path | None, typer.Option(help="The run's folder: the drafter, its logs, and what --resume needs.")]
Target = Annotated[
    str, typer.Option("--target", "-m", help="Alias (smollm2), Hugging Face folder, GGUF file or hub id.")
]
Minutes = Annotated[float | None, typer.Option(help="Length of the run by time; default 60.")]
Steps = Annotated[int | None, typer.Option(help="Length of the run in optimiser steps.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last save in --out, if any.")]
InitFrom = Annotated[Path | None, typer.Option(help="Start from this drafter's weights, and take its sizes.")]
EstimateOnly = Annotated[bool, typer.Option("--estimate", help="Print time, memory and disk, then stop.")]

# Sizes of the drafter. No default here: with --init-from they are that drafter's.
Taps = Annotated[
    str | None, typer.Option(help="Target layers the drafter reads, ascending; default three spread over the target.")
]
Layers = Annotated[int | None, typer.Option(help="Drafter layers; default 1.")]
KvHeads = Annotated[int | None, typer.Option(help="Key/value heads; default as many as query heads.")]
Head = Annotated[str | None, typer.Option(help="Sequential head: markov (the default), gated, rnn or none.")]
Rank = Annotated[int | None, typer.Option(help="Rank of the sequential head; default 64.")]
Block = Annotated[int | None, typer.Option(help="Draft slots per block; default 8.")]
DraftVocab = Annotated[int | None, typer.Option(help="Tokens the drafter can propose; 0 is all; default 8192.")]

BatchBlocks = Annotated[int, typer.Option(help="Blocks per optimiser step.")]
ChunkBlocks = Annotated[int, typer.Option(help="Blocks of one text computed together.")]
Lr = Annotated[float, typer.Option(help="Highest learning rate.")]
Decay = Annotated[float, typer.Option(help="Slot k weighs exp(-(k-1)/decay).")]
Bigrams = Annotated[bool, typer.Option(help="Start the Markov head from counted bigrams.")]
DistanceHeads = Annotated[bool, typer.Option(help="Start most heads looking at the last few positions.")]
CopyHeads = Annotated[
    bool,
    typer.Option(help="Start some heads finding what followed here before, if there is room; needs --distance-heads."),
]
Bf16 = Annotated[
    bool, typer.Option("--bf16", help="Multiply in bfloat16: faster on GPUs and on CPUs with AVX512-BF16 or AMX.")
]
HiddenWeight = Annotated[
    float, typer.Option(help="Weight of the loss that pulls hidden states towards the target's; 0 is off.")
]
WarmStart = Annotated[bool, typer.Option("--warm-start", help="Start the layers from the target's last ones.")]
RefineProb = Annotated[float, typer.Option(help="How often blocks show the drafter's own samples in place of masks.")]
CutLoops = Annotated[bool, typer.Option(help="Cut responses where they begin to loop.")]
HeldOut = Annotated[float, typer.Option(help="Share of the prompts kept for validation.")]
ValidateBlocks = Annotated[int, typer.Option(help="Blocks rolled out per validation at temperature 0.")]
SampledBlocks = Annotated[int, typer.Option(help="Blocks rolled out per validation at temperature 1.")]
SaveMinutes = Annotated[float, typer.Option(help="Time between saves.")]
ValidateMinutes = Annotated[float, typer.Option(help="Time between validations.")]
MaskTokenId = Annotated[int | None, typer.Option(help="Id that stands for masks; default an unused one.")]
CacheGb = Annotated[float, typer.Option(help="Memory for the target's features; the rest is recomputed.")]
CacheDir = Annotated[Path | None, typer.Option(help="Folder to keep features in as well, for later runs too.")]
CacheDirGb = Annotated[float, typer.Option(help="Most that --cache-dir may hold.")]
Seed = Annotated[int, typer.Option(help="Decides first weights and batches.")]

SIZES: dict[str, Any] = {
    "layers": 1,
    "kv_heads": None,
    "head": "markov",
    "rank": 64,
    "block_size": 8,
    "draft_vocab": 8192,
}


def parse_taps(text: str | None) -> tuple[int, ...] | None:
    """Raises SettingsError for anything but whole numbers with commas between."""
    try:
        return None if text is None else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(f"--taps is {text!r}; give layer numbers with commas between, such as 8,18,28.") from None


def chosen_sizes(given: dict[str, Any], inherited: dict[str, Any]) -> dict[str, Any]:
    """Sizes of the drafter: what is given, else those of the drafter to go on from, else defaults. A size that is
    given against the drafter's is refused later, by name."""
    sizes = SIZES | inherited | {name: value for name, value in given.items() if value is not None}
    if sizes["head"] == "none":
        sizes["rank"] = 0
    return sizes | {"draft_vocab": sizes["draft_vocab"] or None}


def check_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not value >= least:
        raise SettingsError(f"{name} is {value}; allowed is {least} or more.")


def check_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise SettingsError(f"{name} is {value}; allowed is 0 or more and below 1.")


def check_length(minutes: float | None, steps: int | None) -> None:
    if minutes is not None and steps is not None:
        raise SettingsError("Both --minutes and --steps are given; leave one of them out.")
    check_least("--minutes", minutes, 0.01)
