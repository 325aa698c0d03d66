"""What `dspark calibrate` and `dspark acceptance` share: options, lists of values, prompts, progress."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark.errors import DataError, SettingsError

if TYPE_CHECKING:
    from rich.progress import Progress

    from dspark.data.sources import Prompt
    from dspark.engine import Engine
    from dspark.measure.answers import Ids

Target = Annotated[
    str, typer.Option("--target", "-m", help="Alias (smollm2), Hugging Face folder, GGUF file or hub id.")
]
Temperatures = Annotated[str, typer.Option(help="Sampling temperatures; 0 is greedy, the same under both rules.")]
Rules = Annotated[str, typer.Option(help="Acceptance rules: rejection, coupled.")]
Batch = Annotated[int, typer.Option(help="Prompts answered together.")]
Seed = Annotated[int, typer.Option(help="Decides what is sampled.")]


def check_range(name: str, value: float | None, least: float) -> None:
    """Raises SettingsError when a given value is below `least`."""
    if value is not None and not value >= least:
        raise SettingsError(f"{name} is {value}; allowed is {least} or more.")


def numbers(name: str, text: str) -> tuple[float, ...]:
    """Values with commas between. Raises SettingsError when one is not a number."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise SettingsError(f"{name} is {text!r}; give numbers with commas between, such as 0,0.7,1.") from None


def names(text: str) -> tuple[str, ...]:
    """Words with commas between."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def chat_ids(engine: "Engine", prompts: "Sequence[Prompt]") -> "list[Ids]":
    """Token ids of conversations through the target's chat template."""
    return [engine.chat_ids(prompt.messages) for prompt in prompts]


def with_room(engine: "Engine", prompts: "Sequence[Ids]", max_tokens: int, what: str = "prompts") -> "list[Ids]":
    """The prompts that leave room for an answer of `max_tokens`; says how many do not.

    Raises:
        DataError: none does.
    """
    from dspark.cli.show import err

    fitting = [ids for ids in prompts if len(ids) + max_tokens <= engine.context]
    left_out = len(prompts) - len(fitting)
    why = f"with {max_tokens} tokens of answer are longer than the context of {engine.context}"
    if not fitting:
        raise DataError(f"All {len(prompts)} {what} {why}; give shorter ones or a smaller --max-tokens.")
    if left_out:
        err.print(f"{left_out} of {len(prompts)} {what} are left out, because they {why}.")
    return fitting


@contextmanager
def progress() -> "Iterator[Progress]":
    """A bar on standard error while something is collected; nothing where that is not a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from dspark.cli.show import err

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        yield bar


def check_folder(name: str, folder: Path) -> None:
    """Raises SettingsError when nothing could be written to `folder`; better before the long part than after it."""
    probe = folder.absolute()
    while not probe.exists():
        probe = probe.parent
    if not (probe.is_dir() and os.access(probe, os.W_OK)):
        raise SettingsError(f"{name} {folder} is not a folder that can be written to; choose another.")
