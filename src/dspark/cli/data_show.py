"""How packed files look on a terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from dspark.cli.show import out

if TYPE_CHECKING:
    from dspark.data import Corpus, Group
    from dspark.target import Tokenizer

_COLUMNS = ("kind", "temp", "texts", "prompt", "response", "mean", "p90", "loops", "covered", "repeats")


def show_provenance(files: Sequence[Path]) -> None:
    """Who wrote each file, and how."""
    from dspark.data import read_provenance

    for path in files:
        made = read_provenance(path)
        if made is None:
            out.print(f"{path}: origin unknown")
            continue
        names = ("temperatures", "weights", "top_p", "max_tokens", "seed", "system", "endpoint_model", "dtype", "exact")
        how = ", ".join(f"{name} {made.sampling[name]}" for name in names if made.sampling.get(name) is not None)
        out.print(f"{path}: by {made.target.name or 'a target'} ({made.target.weights}); {how}", markup=False)


def show_groups(groups: "Sequence[Group]") -> None:
    """A table that fits 80 columns; its last row is everything."""
    table = Table(box=None, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "kind" else "right")
    for group in groups:
        table.add_row(
            "all" if group.kind is None else group.kind,
            "" if group.temperature is None else f"{group.temperature:g}",
            str(group.sequences),
            str(group.prompt_tokens),
            str(group.response_tokens),
            f"{group.mean_response:.0f}",
            f"{group.p90_response:.0f}",
            f"{group.looping:.0%}",
            f"{group.covered:.1%}",
            str(group.repeated_prompts),
        )
    out.print(table)


def show_texts(corpus: "Corpus", tokenizer: "Tokenizer", count: int) -> None:
    """`count` sequences spread over the corpus, control tokens included."""
    shown = min(count, len(corpus))
    for index in (i * len(corpus) // shown for i in range(shown)):
        prompt = corpus.sequence(index)[: corpus.prompt_lens[index]].tolist()
        out.rule(f"{index}: {corpus.kinds[index]}, temperature {corpus.temperatures[index]:g}", align="left")
        out.print(tokenizer.decode(prompt, skip_special_tokens=False), markup=False, style="dim")
        out.print(tokenizer.decode(corpus.response(index).tolist(), skip_special_tokens=False), markup=False)
