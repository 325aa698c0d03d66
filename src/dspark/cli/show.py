"""How answers and their statistics look on a terminal."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from dspark.engine import Chunk, Output, RequestStats
    from dspark.engine.text import Piece

STYLES = {"accepted": "green", "recovered": "yellow", "bonus": "cyan", "plain": ""}
LEGEND = "[green]accepted[/] drafts, [yellow]recovered[/] after a rejection, [cyan]bonus[/] after a full accept, plain"

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def show_stream(chunks: "Iterable[Chunk]", colours: bool) -> "Output | None":
    """Print an answer as it comes; its output, or None when Ctrl-C cut it short (what was printed stays)."""
    output = None
    try:
        for chunk in chunks:
            # Not through rich, which expands tabs, drops control characters, and prints again what Ctrl-C cut short.
            for piece in chunk.pieces:
                out.file.write(_coloured(piece) if colours else piece.text)
            out.file.flush()
            output = chunk.output
    except KeyboardInterrupt:
        output = None
    out.file.write("\n")
    out.file.flush()
    return output


def _coloured(piece: "Piece") -> str:
    colour = STYLES[piece.kind]
    return typer.style(piece.text, fg=colour) if colour and out.color_system and not out.no_color else piece.text


def show_stats(stats: "RequestStats", seconds: float) -> None:
    """Acceptance and time split of one answer, on stderr."""
    table = Table(show_header=False, box=None, pad_edge=False)
    tokens = stats.committed + 1  # the first token comes with the prompt's pass
    table.add_row("speed", f"{tokens / seconds:.1f} tokens/s over the whole answer ({tokens} tokens, {seconds:.2f} s)")
    table.add_row("acceptance length", f"{stats.acceptance_length:.2f} tokens per step ({stats.steps} steps)")
    table.add_row("drafts", f"{stats.drafted} drafted, {stats.verified} verified, {stats.accepted} accepted")
    slots = [f"{a / v:.0%}" for a, v in zip(stats.slot_accepted, stats.slot_verified, strict=True)]
    table.add_row("accepted per slot", " ".join(slots) or "no drafts")
    table.add_row("draft sources", ", ".join(f"{name} {count}" for name, count in sorted(stats.sources.items())))
    steps = max(stats.steps, 1)
    parts = {"draft": stats.draft_ms, "verify": stats.verify_ms, "host": stats.host_ms}
    total = sum(parts.values()) or 1.0
    split = ", ".join(f"{name} {ms / steps:.2f} ms ({ms / total:.0%})" for name, ms in parts.items())
    table.add_row("time per step", f"{split}; prompt {stats.prefill_ms:.0f} ms")
    err.print(table)
