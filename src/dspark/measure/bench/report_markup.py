"""Small pieces of HTML: tables, notes, sections. Whatever is not `Markup` is escaped."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from dspark.measure.bench.records import Quantiles, Spread


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report; `name` is its anchor."""

    name: str
    title: str
    body: str

    def __str__(self) -> str:
        return f'<section id="{escape(self.name)}"><h2>{escape(self.title)}</h2>{self.body}</section>'


def text(value: object) -> str:
    return value if isinstance(value, Markup) else escape(str(value))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], words: Sequence[int] = ()) -> str:
    """Rows begin with their name; columns without any value are left out. `words` are columns of text, not figures."""
    lines = [list(row) for row in rows]
    kept = [0, *(n for n in range(1, len(head)) if any(line[n] not in ("", "-") for line in lines))]
    kind = [' class="words"' if n in words else "" for n in range(len(head))]
    first = "".join(f'<th scope="col"{kind[n]}>{text(head[n])}</th>' for n in kept)
    body = []
    for line in lines:
        cells = "".join(f"<td{kind[n]}>{text(line[n])}</td>" for n in kept[1:])
        body.append(f'<tr><th scope="row">{text(line[0])}</th>{cells}</tr>')
    return f'<div class="scroll"><table><thead><tr>{first}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def hint(words: str) -> str:
    return f'<p class="hint">{escape(words)}</p>'


def note(words: str) -> str:
    return f'<p class="note" role="note">{escape(words)}</p>'


def folded(summary: str, body: str, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(summary)}</summary>{body}</details>"


def grid(figures: Iterable[str]) -> str:
    return f'<div class="grid">{"".join(figures)}</div>'


def code(words: str) -> str:
    return f"<pre><code>{escape(words)}</code></pre>"


# Values as text ---------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A fixed number of decimals; a dash where there is no value."""
    return "-" if value is None else f"{value:,.{digits}f}{unit}"


def percent(share: float | None, digits: int = 1) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def scaled(value: float | None, unit: str) -> str:
    """Billions of a unit: `23.1 GB/s`."""
    return "-" if value is None else f"{value / 1e9:.3g} G{unit}"


def spread(value: Spread | None, digits: int = 2, unit: str = "") -> str:
    """Median, and the quartiles over rounds where there are several."""
    if value is None:
        return "-"
    told = f"{value.median:,.{digits}f}{unit}"
    return told if value.rounds < 2 else f"{told} ({value.low:,.{digits}f}-{value.high:,.{digits}f})"


def quantiles(value: Quantiles | None, digits: int = 1) -> tuple[str, str, str]:
    if value is None:
        return "-", "-", "-"
    return number(value.p50, digits), number(value.p90, digits), number(value.p99, digits)


def verdict(word: str | None) -> str:
    """A verdict in its colour, the word itself saying the same."""
    return "" if word is None else Markup(f'<span class="{escape(word)}">{escape(word)}</span>')
