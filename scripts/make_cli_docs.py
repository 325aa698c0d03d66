"""Write docs/cli.md from the commands' own help texts: `python scripts/make_cli_docs.py`."""

from pathlib import Path
from typing import Any

import typer

from dspark.cli.main import app

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
WIDTH = 100
INTRODUCTION = """\
# Command line

Made by `python scripts/make_cli_docs.py` from the help texts; edit those, not this page.

A mistake is one line on standard error, beginning with `dspark: error:`, and exit status 2. Ctrl-C ends a command
with status 130 and keeps what was printed. Answers go to standard output, everything else to standard error.
"""


def page() -> str:
    """The content of docs/cli.md."""
    group: Any = typer.main.get_command(app)
    return "\n".join([INTRODUCTION, *_sections("dspark", group)])


def _sections(title: str, command: Any) -> list[str]:
    """A command's section, then those of the commands in it."""
    parts = [_section(title, command)]
    for name, inner in getattr(command, "commands", {}).items():
        parts += _sections(f"{title} {name}", inner)
    return parts


def _section(title: str, command: Any) -> str:
    context = command.context_class(command, info_name=title, terminal_width=WIDTH, color=False)
    lines = [line.rstrip() for line in command.get_help(context).splitlines()]
    return "\n".join([f"## {title}", "", "```text", *lines, "```", ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
