"""`dspark acceptance`: tokens kept per step, by set of prompts, temperature and rule."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import measuring, options
from dspark.errors import SettingsError

if TYPE_CHECKING:
    from dspark.engine import Engine
    from dspark.measure.acceptance import Acceptance
    from dspark.measure.answers import Decoding, Ids


def acceptance(
    prompts: Annotated[list[Path], typer.Option(help="JSONL files of prompts, or folders; each file is a set.")],
    target: measuring.Target = "smollm2",
    drafter: options.Drafter = "auto",
    proposer: options.Proposer = "auto",
    policy: options.Policy = "fixed:4",
    profile: options.Profile = "auto",
    temperatures: measuring.Temperatures = "0,1",
    rules: measuring.Rules = "rejection,coupled",
    limit: Annotated[int | None, typer.Option(help="Most prompts of each set; default all.")] = None,
    max_tokens: options.MaxTokens = 256,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all counts to this file too.")] = None,
    seed: measuring.Seed = 0,
    batch: measuring.Batch = 8,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    kv_gb: options.KvGb = 1.0,
    threads: options.Threads = None,
) -> None:
    """Count how many tokens a step keeps, set by set; a table in Markdown on standard output.

    Acceptance length is committed tokens per decoding step: bonus tokens and a final end token count, and so do steps
    without a draft. Counts do not depend on how fast this machine is.

    Examples:

    \b
    dspark acceptance --prompts eval
    dspark acceptance --prompts eval --proposer lookup --temperatures 0 --limit 10 --json lookup.json
    """
    from dspark.measure.answers import decodings
    from dspark.measure.prompts import prompt_sets

    measuring.check_range("--limit", limit, 1)
    measuring.check_range("--max-tokens", max_tokens, 1)
    measuring.check_range("--seed", seed, 0)
    if json_file:
        measuring.check_folder("--json", json_file.parent)
    columns = decodings(measuring.names(rules), measuring.numbers("--temperatures", temperatures))
    found = prompt_sets(prompts, limit)
    engine = options.load_engine(
        model=target,
        drafter=drafter,
        proposer=proposer,
        policy=policy,
        profile=profile,
        device=device,
        dtype=dtype,
        kv_gb=kv_gb,
        threads=threads,
        max_batch=batch,
    )
    sets = {
        name: measuring.with_room(engine, measuring.chat_ids(engine, each), max_tokens, f"prompts of {name}")
        for name, each in found.items()
    }
    cells = _run(engine, sets, columns, max_tokens, seed)
    _show(cells, columns)
    if json_file:
        _write(json_file, engine, cells, {"max_tokens": max_tokens, "seed": seed, "limit": limit, "batch": batch})


def _run(
    engine: "Engine", sets: "dict[str, list[Ids]]", columns: "list[Decoding]", max_tokens: int, seed: int
) -> "list[Acceptance]":
    from dspark.cli.show import err
    from dspark.measure.acceptance import Acceptance, measure_acceptance
    from dspark.measure.answers import sibling

    def engine_for(decoding: "Decoding") -> "Engine":
        return sibling(engine, acceptance=decoding.rule)

    cells = []
    with measuring.progress() as bar:
        task = bar.add_task("answers", total=len(columns) * sum(map(len, sets.values())))
        for event in measure_acceptance(engine_for, sets, columns, max_tokens, seed):
            if isinstance(event, Acceptance):
                cells.append(event)
                line = f"{event.decoding} {event.name}: AL {event.acceptance_length:.2f}"
                bar.update(task, description=line)
                if not err.is_terminal:
                    err.print(line)
            else:
                bar.advance(task)
    return cells


def _show(cells: "list[Acceptance]", columns: "list[Decoding]") -> None:
    from dspark.cli.markdown import markdown_table, percent
    from dspark.cli.show import out
    from dspark.measure.acceptance import all_sets, mean_length

    names = list(dict.fromkeys(cell.name for cell in cells))
    by_place = {(cell.name, cell.decoding): cell for cell in cells}
    rows = [[name, *(f"{by_place[name, column].acceptance_length:.2f}" for column in columns)] for name in names]
    rows.append(["**mean**", *(f"**{mean_length(cells, column):.2f}**" for column in columns)])
    headers = ["acceptance length", *map(str, columns)]
    out.print(markdown_table(headers, rows), markup=False)
    totals = [all_sets(cells, column) for column in columns]
    slots = max(len(total.slot_verified) for total in totals)
    rows = [
        [str(k + 1), *(percent(t.slot_survival[k]) if k < len(t.slot_survival) else "-" for t in totals)]
        for k in range(slots)
    ]
    rows.append(["sources", *(_sources(total) for total in totals)])
    out.print("\n" + markdown_table(["draft slot kept", *map(str, columns)], rows), markup=False)


def _sources(total: "Acceptance") -> str:
    return ", ".join(f"{name} {100 * n / total.steps:.0f} %" for name, n in sorted(total.sources.items())) or "no steps"


def _write(path: Path, engine: "Engine", cells: "list[Acceptance]", settings: dict[str, Any]) -> None:
    config = engine.config
    values = {
        "target": engine.target.fingerprint.to_dict(),
        "settings": {
            "drafter": config.drafter,
            "proposer": engine.proposer.name,
            "policy": config.policy,
            "dtype": config.dtype,
            **settings,
        },
        "cells": [
            {
                "set": cell.name,
                "rules": cell.decoding.rules,
                "temperature": cell.decoding.temperature,
                "acceptance_length": cell.acceptance_length,
                "prompts": cell.prompts,
                "steps": cell.steps,
                "committed": cell.committed,
                "slot_verified": cell.slot_verified,
                "slot_accepted": cell.slot_accepted,
                "sources": cell.sources,
            }
            for cell in cells
        ],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"--json {path} cannot be written ({error.strerror or error}); choose another.") from None
