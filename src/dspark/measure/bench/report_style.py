"""How a report looks: light and dark, narrow and wide."""

_LIGHT = {
    "back": "#fff",
    "card": "#f5f6f8",
    "ink": "#1b1f24",
    "faint": "#57606a",
    "edge": "#c8ced6",
    "band": "#dde3ea",
    "good": "#006b4d",
    "bad": "#a8122a",
}
_DARK = {
    "back": "#14171b",
    "card": "#1e2329",
    "ink": "#e6e9ed",
    "faint": "#a2acb8",
    "edge": "#434c57",
    "band": "#333b45",
    "good": "#57d3a8",
    "bad": "#ff8b98",
}
# Blue, orange, green, violet, ochre, red, teal, and grey for plain decoding.
_LIGHT_MARKS = ("#0060a8", "#b04500", "#006b4d", "#7b3fa0", "#806000", "#c2185b", "#00727a", "#5c636b")
_DARK_MARKS = ("#6fb9f2", "#f2a45c", "#57d3a8", "#c79bf0", "#dcc04c", "#ff8fb1", "#5cced6", "#a2acb8")

_RULES = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--back); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { margin: 0; font-size: 1.5rem; line-height: 1.25; }
h2 { margin: 0 0 .25rem; font-size: 1.2rem; }
h3 { margin: 1rem 0 .25rem; font-size: 1rem; }
p { margin: .25rem 0 .75rem; max-width: 60rem; }
a { color: inherit; }
section { margin-top: 2.25rem; }
nav { margin-top: .75rem; display: flex; flex-wrap: wrap; gap: .1rem .9rem; font-size: .875rem; }
.hint, figcaption { color: var(--faint); font-size: .875rem; }
.note { padding: .5rem .75rem; border-left: .25rem solid var(--bad); background: var(--card); }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
figure { margin: 0; padding: .6rem .75rem; background: var(--card); border-radius: .4rem; min-width: 0; }
figcaption { font-weight: 600; }
.scroll { overflow-x: auto; }
.chart { display: block; width: 100%; min-width: 18rem; max-width: 36rem; height: auto; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--edge); text-align: right; vertical-align: top;
  white-space: nowrap; }
th:first-child, .words { text-align: left; }
tbody th { font-weight: 400; position: sticky; left: 0; background: var(--back); }
dt { font-weight: 600; margin-top: .5rem; }
dd { margin: 0; max-width: 60rem; }
details { margin: .5rem 0; }
td.words { white-space: normal; min-width: 9rem; }
summary { cursor: pointer; color: var(--faint); font-size: .875rem; }
pre { padding: .75rem; background: var(--card); border-radius: .4rem; overflow-x: auto; white-space: pre-wrap; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .25rem 0 .5rem; padding: 0; list-style: none;
  font-size: .875rem; }
.mark { width: 26px; height: 14px; margin-right: .35rem; vertical-align: -2px; }
.faster { color: var(--good); font-weight: 600; }
.slower { color: var(--bad); font-weight: 600; }
.none { color: var(--faint); }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .tick, svg .small { fill: var(--faint); font-size: 11px; }
svg .label { fill: var(--faint); }
svg .value { font-variant-numeric: tabular-nums; }
.axis { stroke: var(--faint); }
.rule { stroke: var(--edge); stroke-opacity: .55; }
.at { stroke: var(--faint); stroke-dasharray: 4 3; }
.band { fill: var(--band); }
.whisker { stroke: var(--ink); stroke-width: 1.5; stroke-opacity: .7; }
.line { fill: none; stroke-width: 1.8; }
.dash { stroke-dasharray: 6 3; }
.dots { stroke-dasharray: 2 3; }
@media (max-width: 30rem) { body { padding: .6rem; } figure { padding: .5rem .4rem; } }
@media print { section { break-inside: avoid; } }
"""


def _variables(colours: dict[str, str], marks: tuple[str, ...]) -> str:
    every = colours | {f"m{n}": colour for n, colour in enumerate(marks)}
    return " ".join(f"--{name}: {colour};" for name, colour in every.items())


STYLE = "\n".join(
    (
        f":root {{ color-scheme: light dark; {_variables(_LIGHT, _LIGHT_MARKS)} }}",
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK, _DARK_MARKS)} }} }}",
        *(f".fill.s{n} {{ fill: var(--m{n}); }} .line.s{n} {{ stroke: var(--m{n}); }}" for n in range(8)),
        _RULES.strip(),
    )
)
