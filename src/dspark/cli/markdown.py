"""Tables that can be pasted into a page."""

from collections.abc import Iterable, Sequence


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Text left, figures as they are given."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
