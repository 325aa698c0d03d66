"""The `dspark` command."""

import logging
import os
import sys
from typing import Any, NoReturn

# Read by OpenMP when torch loads, so before any import of it. Idle workers spin briefly, then sleep: the default spins
# for milliseconds, which costs a factor of ten beside another busy process.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import typer

from dspark import __version__
from dspark.cli import acceptance, bench, calibrate, chat, data, doctor, generate, plan, profile, serve, table, train
from dspark.errors import DsparkError

app = typer.Typer(
    name="dspark",
    help="Make a language model answer faster without changing a word of what it says.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
# Unknown options, missing arguments and the like; Typer has no public name for them.
UsageError: Any = typer.BadParameter.__mro__[1]

app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
data.app.command("table")(table.table)
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("calibrate")(calibrate.calibrate)
app.command("acceptance")(acceptance.acceptance)
app.command("bench")(bench.bench)
app.command("estimate")(train.estimate)
app.command("profile")(profile.profile)
app.command("plan")(plan.plan)
app.command("serve")(serve.serve)
app.command("doctor")(doctor.doctor)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dspark {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit status 2."""
    logging.basicConfig(level=logging.INFO, format="dspark: %(message)s", stream=sys.stderr)
    for noisy in ("httpx", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], prog_name="dspark", standalone_mode=False))
    except UsageError as error:
        _fail(f"{error.format_message().rstrip('.')}; see dspark --help.")
    except DsparkError as error:
        _fail(str(error))
    except typer.Abort:  # Ctrl-C, in older versions of Typer
        sys.exit(130)


def _fail(message: str) -> NoReturn:
    typer.echo(f"dspark: error: {message}", err=True)
    sys.exit(2)


if __name__ == "__main__":
    main()
