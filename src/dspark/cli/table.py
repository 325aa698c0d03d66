"""`dspark data table`: from packed token files to the corpus table that lookup drafts from."""

import re
from pathlib import Path
from typing import Annotated

import typer

from dspark.errors import SettingsError


def table(
    data: Annotated[list[Path], typer.Option(help="Packed token files; more may follow, or repeat the option.")],
    out: Annotated[Path, typer.Option(help="The table to write, such as table.dspt.")],
    more: Annotated[list[Path] | None, typer.Argument(help="More data files.", show_default=False)] = None,
    target: Annotated[
        str, typer.Option("--target", "-m", help="Alias (smollm2), Hugging Face folder, GGUF file or hub id.")
    ] = "smollm2",
    orders: Annotated[str, typer.Option(help="Lengths of contexts in tokens, shortest to longest.")] = "1-4",
    max_mb: Annotated[float, typer.Option(help="Largest file; what is right most often stays.")] = 8.0,
    min_count: Annotated[int, typer.Option(help="Leave out what followed its context less often.")] = 2,
    cut_loops: Annotated[bool, typer.Option(help="Cut responses where they begin to loop.")] = True,
) -> None:
    """Count what the target says after its last few tokens.

    Lookup drafts from the table where the request's own text has no match. It is found by itself as table.dspt beside
    a drafter, or with any name that ends in .dspt in the folder tables of the cache.

    Examples:

    \b
    dspark data table --data data/*.npz --out table.dspt
    dspark data table --data data/*.npz --out small.dspt --max-mb 1
    """
    from dspark.data.table import TableSettings

    settings = TableSettings(*_parse_orders(orders), min_count, max_mb)  # before the slow part
    from dspark.artifacts.table import write_table
    from dspark.cli.show import err
    from dspark.data import Described, read_corpus
    from dspark.data import cut_loops as without_loops
    from dspark.data.table import count_table

    made_by = Described.load(target)
    spec = made_by.spec
    corpus = read_corpus([*data, *(more or [])], spec.vocab_size, spec.context, made_by.fingerprint)
    if cut_loops:
        corpus = without_loops(corpus)
    for note in corpus.notes:
        err.print(note, markup=False)
    counted = count_table(corpus, settings, made_by.fingerprint)
    write_table(out, counted)
    sizes = ", ".join(f"{len(rows)} of {order}" for order, rows in counted.orders.items())
    err.print(
        f"{out}: {out.stat().st_size / 1e6:.2f} MB, {len(counted)} contexts ({sizes} tokens) from "
        f"{corpus.response_tokens} response tokens.",
        markup=False,
    )


def _parse_orders(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if match is None:
        raise SettingsError(f"--orders is {text!r}; give a range such as 1-4, or one number.")
    return int(match[1]), int(match[2] or match[1])
