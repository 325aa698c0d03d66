"""A result as one HTML page that needs nothing but itself: no script, no network, light and dark."""

from collections.abc import Sequence

from dspark.measure.bench.metrics import DEFINITIONS
from dspark.measure.bench.records import CONTROL, PLAIN, BenchResult, Proof, Row
from dspark.measure.bench.report_details import acceptance, arrivals, latencies, reliability, time_split, utilisation
from dspark.measure.bench.report_markup import (
    Section,
    code,
    folded,
    hint,
    note,
    number,
    scaled,
    spread,
    table,
    text,
)
from dspark.measure.bench.report_speed import concurrency, depth, every_row, speedups
from dspark.measure.bench.report_style import STYLE
from dspark.measure.bench.report_view import View, machine_line, rows_of_mode, tally, warnings, work_line

MOST_PARTINGS = 200
# Whatever slips past escaping still cannot load or run anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(result: BenchResult) -> str:
    """The whole report of a run."""
    view = View(result)
    parts = [
        summary(view),
        speedups(view),
        concurrency(view),
        depth(view),
        acceptance(view),
        reliability(view),
        time_split(view),
        latencies(view),
        arrivals(view),
        utilisation(view),
        proof(view),
        control(view),
        machine(view),
        every_row(view),
        definitions(),
        reproduce(view),
    ]
    title = f"Benchmark of {result.target_name}"
    intro = f"dspark {result.version}, {result.started}. {work_line(result)} {machine_line(result)}"
    return document(title, intro, warnings(result), [part for part in parts if part])


def document(title: str, intro: str, notes: Sequence[str], sections: Sequence[Section]) -> str:
    """A page of sections with links to them on top."""
    links = "".join(f'<a href="#{text(part.name)}">{text(part.title)}</a>' for part in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>\n{STYLE}\n</style></head>\n<body><header><h1>{text(title)}</h1>"
        f"{hint(intro)}</header>{''.join(map(note, notes))}<nav>{links}</nav>\n<main>"
        + "\n".join(map(str, sections))
        + "</main></body></html>\n"
    )


def summary(view: View) -> Section | None:
    """One line a mode: how often it won and lost, and where most."""
    lines = []
    for mode in view.modes:
        rows = [row for row in rows_of_mode(view.result, mode) if row.speedup]
        if not rows:
            continue
        ordered = sorted(rows, key=lambda row: row.speedup.median if row.speedup else 0.0)
        lines.append((mode, tally(rows), _where(ordered[-1]), _where(ordered[0]), _equality(rows)))
    if not lines:
        return None
    told = hint(
        f"Speed-up over {PLAIN!r} on the same prompts, turn by turn. A difference inside the noise, which "
        f"{CONTROL!r} shows, is none."
    )
    head = ("mode", "verdict by group", "best", "worst", "answers as plain's")
    notes = "".join(hint(f"{mode}: {words}") for mode, words in view.result.notes.items())
    return Section("summary", "Summary", told + table(head, lines, words=(1, 2, 3, 4)) + notes)


def _where(row: Row) -> str:
    return f"{row.speedup.median:.2f}x ({row.group})" if row.speedup else "-"


def _equality(rows: Sequence[Row]) -> str:
    """Over all groups in which answers were compared."""
    said = [row.equal for row in rows if row.equal]
    if not said:
        return "-"
    bad, ties = said.count("no"), said.count("ties")
    if bad:
        return f"no, in {bad} of {len(said)} groups"
    return f"yes, but for near-ties in {ties} of {len(said)} groups" if ties else f"yes, in {len(said)} groups"


def proof(view: View) -> Section | None:
    """Which answers are plain's, by their hashes, and where those part that are not."""
    proofs = view.result.proofs
    if not proofs:
        return None
    head = ("mode", "equality", "equal answers", "part at a near-tie", "part elsewhere")
    modes = dict.fromkeys(each.mode for each in proofs)
    lines = [(mode, *_counted([each for each in proofs if each.mode == mode])) for mode in modes]
    every = [(str(each.group), each.mode, *_counted([each])) for each in proofs]
    by_group = folded("By group", table(("group", *head), every, words=(1, 2)))
    told = hint(
        "Hashes of output ids against plain's on the same prompts. A near-tie: the two best tokens' scores lie closer "
        "than the kernels' own rounding noise."
    )
    pairs = [(each, parting) for each in proofs for parting in each.partings]
    partings = table(
        (
            "group",
            "mode",
            "prompt",
            "position (tokens)",
            "gap between the two (logits)",
            "kernel noise (logits)",
            "tie",
        ),
        [
            (
                str(each.group),
                each.mode,
                parting.prompt,
                parting.position,
                _tiny(parting.gap),
                _tiny(parting.noise),
                "yes" if parting.tie else "no",
            )
            for each, parting in pairs[:MOST_PARTINGS]
        ],
        words=(1,),
    )
    shown = f"{len(pairs)} differences" + (f", the first {MOST_PARTINGS}" if len(pairs) > MOST_PARTINGS else "")
    body = told + table(head, lines, words=(1,)) + by_group + (folded(shown, partings) if pairs else "")
    return Section("proof", "Proof: the same answers", body)


def _counted(proofs: Sequence[Proof]) -> tuple[str, str, int, int]:
    """Of proofs together: what was promised, equal answers, near-ties, other partings."""
    promised = all(each.expected for each in proofs)
    partings = [parting for each in proofs for parting in each.partings]
    ties = sum(parting.tie for parting in partings)
    equal = f"{sum(each.equal for each in proofs)} of {sum(each.compared for each in proofs)}"
    return "promised" if promised else "not promised", equal, ties, len(partings) - ties


def _tiny(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def control(view: View) -> Section | None:
    """Plain against itself."""
    found = view.result.control
    if found is None:
        return None
    own = {group: view.row(CONTROL, group) for group in view.groups}
    lines = [
        (str(group), spread(row.speedup, 3, "x"), "-" if row.noise is None else f"± {row.noise:.3f}")
        for group, row in own.items()
        if row is not None and row.speedup
    ]
    words = (
        f"Plain over plain: {spread(found.ratio, 3, 'x')} over {found.ratio.rounds} paired rounds, interquartile range "
        f"{found.spread:.3f}. A run is restless, and says nothing, past {found.limit:.3f}."
    )
    return Section(
        "control", "Control", hint(words) + folded("By group", table(("group", "plain over plain", "noise"), lines))
    )


def machine(view: View) -> Section:
    """Where it ran."""
    result, own = view.result, view.result.machine
    facts = [
        ("processor", own.cpu),
        ("cores; threads used", f"{own.cores}; {own.threads}"),
        ("memory", scaled(own.memory_bytes, "B")),
        ("device", own.device),
        ("load, 1-minute average, before and after", f"{number(own.load_before)}; {number(own.load_after)}"),
    ]
    if own.peaks:
        facts.append(("measured peak, reading memory", scaled(own.peaks.bytes_per_s, "B/s")))
        facts.append(("measured peak, matrix products", scaled(own.peaks.flop_per_s, "FLOP/s")))
    if result.model:
        facts.append(("weights read in a pass of the target", scaled(result.model.weight_bytes, "B")))
        facts.append(("arithmetic of one token", scaled(result.model.flop_per_token, "FLOP")))
        facts.append(("keys and values of one position", f"{result.model.kv_token_bytes / 1e3:.3g} kB"))
    facts += [(name, version) for name, version in sorted(own.versions.items())]
    return Section("machine", "Machine", table(("what", "value"), facts, words=(1,)))


def definitions() -> Section:
    """What every figure means."""
    items = "".join(f"<dt>{text(name)}</dt><dd>{text(words)}</dd>" for name, words in DEFINITIONS.items())
    return Section("definitions", "What the figures mean", f"<dl>{items}</dl>")


def reproduce(view: View) -> Section:
    """The command, and all settings."""
    values = view.result.settings.to_dict()
    shown = [(name, ", ".join(map(str, v)) if isinstance(v, tuple | list) else str(v)) for name, v in values.items()]
    settings = folded("All settings", table(("setting", "value"), shown, words=(1,)))
    left_out = "".join(hint(sentence) for sentence in view.result.skipped)
    return Section("reproduce", "Run it again", code(view.result.command) + settings + left_out)
