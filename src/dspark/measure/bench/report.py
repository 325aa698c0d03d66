"""A result on disk: everything as JSON, a page to look at, a table for a README."""

from collections.abc import Sequence
from pathlib import Path

from dspark.artifacts.files import replacing
from dspark.errors import DataError
from dspark.measure.bench.control import FEWEST_ROUNDS
from dspark.measure.bench.records import PLAIN, RESULT_FILE, BenchResult, Group, Row
from dspark.measure.bench.report_html import page
from dspark.measure.bench.report_view import View, machine_line, setting, warnings, work_line

PAGE_FILE, TABLE_FILE = "bench.html", "bench.md"
MEANING = f"(none): inside it, or fewer than {FEWEST_ROUNDS} rounds to tell, which is no difference."


def write_report(result: BenchResult, folder: Path) -> tuple[Path, ...]:
    """Write `bench.json` (everything), `bench.md` (a short table) and `bench.html` (one page that needs nothing else)
    into `folder`, and say where they are.

    Raises:
        DataError: a file cannot be written.
    """
    result.write(folder / RESULT_FILE)
    written = [folder / RESULT_FILE]
    for name, content in ((TABLE_FILE, markdown(result)), (PAGE_FILE, page(result))):
        write_text(folder / name, content)
        written.append(folder / name)
    return tuple(written)


def write_text(path: Path, content: str) -> None:
    """Raises DataError when the file cannot be written."""
    try:
        with replacing(path) as part:
            part.write_text(content, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror or error}); choose another --out.") from None


def markdown(result: BenchResult) -> str:
    """Speed-ups with the noise floor beside each, and what they rest on: a row a mode, a column a kind of text, a
    table a temperature and load."""
    view = View(result)
    parts = [*(f"**{words}**" for words in warnings(result))]
    loads = dict.fromkeys((group.temperature, group.concurrency, group.depth) for group in view.closed)
    for temperature, concurrency, depth in loads:
        groups = [
            g for g in view.closed if (g.temperature, g.concurrency, g.depth) == (temperature, concurrency, depth)
        ]
        deep = f", prompts of {depth} tokens" if depth else ""
        parts.append(f"Temperature {temperature:g}, {concurrency} at a time{deep}, speed-up over plain decoding:")
        parts.append(_table(view, groups))
    if view.open:
        parts.append("Arrivals at a rate, whole answers:")
        parts.append(_arrivals(view))
    parts.append(
        f"± is the noise floor: how far plain decoding strays from itself in the same rounds. {MEANING} {_told(result)}"
    )
    parts.append(f"{result.target_name}; {machine_line(result)} {work_line(result)} {result.started}.")
    parts.extend(f"{mode}: {words}" for mode, words in result.notes.items())
    parts.extend(result.skipped)
    parts.append(f"```bash\n{result.command}\n```")
    return "\n\n".join(parts) + "\n"


def _told(result: BenchResult) -> str:
    control = result.control
    marked = any(row.equal == "no" for row in result.rows)
    differ = " ≠: answers that are not all plain's." if marked else ""
    if control is None:
        return differ.strip()
    return f"Over all groups the control came to {control.ratio.median:.3f}x, range {control.spread:.3f}.{differ}"


def _table(view: View, groups: Sequence[Group]) -> str:
    lines = [_line("mode", [group.kind for group in groups]), _line("---", ["---:"] * len(groups))]
    for mode in view.modes:
        rows = [view.row(mode, group) for group in groups]
        if any(rows):
            lines.append(_line(mode, [_cell(row) for row in rows]))
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    if row.speedup is None:
        return f"{row.tok_per_s.median:.1f} tok/s"
    noise = "" if row.noise is None else f" ± {row.noise:.2f}"
    # The verdict is spelt out where the figure could be taken for a gain.
    told = f" ({row.verdict})" if row.verdict in ("none", "slower") else ""
    return f"{row.speedup.median:.2f}x{noise}{told}{' ≠' if row.equal == 'no' else ''}"


def _arrivals(view: View) -> str:
    heads = ["p50", "p99", "p99 over plain's", "memory use", "arithmetic use"]
    lines = [_line("group", ["mode", *heads]), _line("---", ["---", *["---:"] * len(heads)])]
    for group in view.open:
        plain = view.row(PLAIN, group)
        for row in view.rows_of(group):
            over = f"{row.latency_s.p99 / plain.latency_s.p99:.2f}x" if plain else "-"
            use = [row.use.bytes_share, row.use.flop_share] if row.use else [None, None]
            shares = ["-" if share is None else f"{100 * share:.0f} %" for share in use]
            cells = [row.mode, f"{row.latency_s.p50:.2f} s", f"{row.latency_s.p99:.2f} s", over, *shares]
            lines.append(_line(f"{group.kind}, {setting(group)}", cells))
    return "\n".join(lines)


def _line(first: str, cells: Sequence[str]) -> str:
    """A row of a table; a bar inside a cell would end it."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in (first, *cells))} |"
