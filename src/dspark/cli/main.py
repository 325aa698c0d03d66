"""The `dspark` command."""

import logging
import os
import sys

# Read by OpenMP when torch loads, so before any import of it. Idle workers spin briefly, then sleep: the default spins
# for milliseconds, which costs a factor of ten beside another busy process.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import typer

from dspark import __version__
from dspark.cli import chat, doctor, generate
from dspark.errors import DsparkError

app = typer.Typer(
    name="dspark",
    help="Make a language model answer faster without changing a word of what it says.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.generate)
app.command("chat")(chat.chat)
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
        app()
    except DsparkError as error:
        typer.echo(f"dspark: error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
