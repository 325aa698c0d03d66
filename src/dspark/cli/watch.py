"""Progress of a long run: a bar on a terminal, a line a minute in a log."""

import time
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark.cli.show import err

if TYPE_CHECKING:
    from dspark.data import Report

LOG_EVERY_S = 60.0


def watch(reports: "Generator[Report, None, None]", what: str, done: int, total: int) -> None:
    """Run to the end; `done` of `total` are there already. Ctrl-C ends the command with status 130."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    began = logged = time.monotonic()
    if 0 < done < total:
        err.print(f"{done} of {total} {what} are there from an earlier run.")
    try:
        with (
            closing(reports),
            Progress(*columns, TimeRemainingColumn(), console=err, disable=not err.is_terminal) as bar,
        ):
            task = bar.add_task("", total=total, completed=done)
            for report in reports:
                now = time.monotonic()
                speed = f"{report.tokens / (now - began):.0f} tokens/s"
                bar.update(task, completed=report.done, description=speed)
                if not err.is_terminal and now - logged >= LOG_EVERY_S:
                    logged = now
                    left = _left(report.done - done, total - report.done, now - began)
                    err.print(f"{report.done} of {total} {what}, {speed}{left}")
    except KeyboardInterrupt:
        err.print("Stopped; what is finished is kept, and the same command goes on from there.")
        raise typer.Exit(130) from None


def _left(done: int, missing: int, seconds: float) -> str:
    """Time left at the speed so far."""
    if done <= 0:
        return ""
    minutes = round(missing / done * seconds / 60)
    return f", {minutes // 60} h {minutes % 60:02d} min left"
