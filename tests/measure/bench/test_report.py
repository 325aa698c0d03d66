"""A result as files: everything in JSON, a table with its losses, a page that needs nothing but itself."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from dspark.errors import DataError
from dspark.measure.bench.metrics import DEFINITIONS
from dspark.measure.bench.records import BenchResult, Group
from dspark.measure.bench.report import markdown, write_report
from dspark.measure.bench.report_html import page
from tests.measure.bench.made_up import FACTORS, made_up
from tests.sentences import assert_one_sentence
from tests.serve.browser import chromium

SWEEP = tuple(Group("code", 0.0, count) for count in (1, 4, 16))
DEPTHS = tuple(Group("code", 0.0, 1, depth) for depth in (0, 512, 2048))
EVERY = (*SWEEP, *DEPTHS[1:], Group("chat", 1.0, 1), Group("code", 0.0, 8, 0, 0.4))
RESOURCES = {"src", "href", "xlink:href", "srcset", "data", "action", "poster", "background"}


class Page(HTMLParser):
    """Checks nesting, and keeps what tests ask for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.anchors, self.links, self.tags, self.labels, self.text = [], set(), [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in RESOURCES]
        if "id" in values:
            self.anchors.add(values["id"])
        if tag not in {"meta"}:
            self.open.append((tag, values.get("class", "")))

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == ("text", "label"):
            self.labels.append(data)
        if self.open and self.open[-1][0] != "style":
            self.text.append(data)

    def said(self):
        return " ".join("".join(self.text).split())


def cells(table):
    """Rows of the first Markdown table in a text, by their first cell."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines}


def test_three_files_are_written_and_the_json_gives_the_result_back(tmp_path):
    result = made_up()
    written = write_report(result, tmp_path / "new")
    assert [path.name for path in written] == ["bench.json", "bench.md", "bench.html"]
    assert BenchResult.read(written[0]) == result
    assert written[1].read_text(encoding="utf-8") == markdown(result)
    assert written[2].read_text(encoding="utf-8") == page(result)


def test_a_folder_that_is_a_file_is_refused_in_a_sentence(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError) as caught:
        write_report(made_up(), tmp_path / "taken")
    assert_one_sentence(caught.value)


# Markdown ---------------------------------------------------------------------------------------------------------


def test_the_table_has_every_mode_and_says_which_lose():
    rows = cells(markdown(made_up()))
    assert list(rows) == ["mode", "---", *FACTORS]
    assert rows["mode"] == ["code", "chat"]
    assert all("(slower)" in cell and cell.startswith("0.7") for cell in rows["small model"])
    assert all("slower" not in cell and cell.startswith("1.4") for cell in rows["lookup"])
    assert all(cell.endswith("tok/s") for cell in rows["plain"])


def test_the_noise_floor_stands_beside_every_ratio():
    rows = cells(markdown(made_up()))
    assert all(re.match(r"\d\.\d\dx ± \d\.\d\d", cell) for name in rows if name in FACTORS and name != "plain"
               for cell in rows[name])  # fmt: skip


def test_a_mode_inside_the_noise_gets_no_verdict_but_none():
    result = made_up({"plain": 1.0, "plain again": 1.0, "same": 1.0, "slowed": 0.9}, jitter=0.02)
    rows = cells(markdown(result))
    assert all(cell.endswith("(none)") for name in ("plain again", "same") for cell in rows[name])
    assert all(cell.endswith("(slower)") for cell in rows["slowed"])
    assert "no difference in 2" in Page(page(result)).said()


def test_other_answers_than_plains_are_marked():
    rows = cells(markdown(made_up()))
    assert all("≠" in cell for cell in rows["transformers"])
    assert all("≠" not in cell for cell in rows["lookup"])


def test_the_table_names_command_machine_and_work():
    text = markdown(made_up(skipped=("Nothing was installed; left out.",), notes={"lookup": "own text only"}))
    assert "```bash\ndspark bench --target toy\n```" in text
    assert "Made-up CPU, 2 cores" in text and "torch 1.2.3" in text and "5 rounds" in text
    assert "Nothing was installed; left out." in text and "lookup: own text only" in text


def test_each_temperature_and_load_has_its_own_table_and_arrivals_have_latencies():
    text = markdown(made_up(groups=EVERY))
    for title in ("Temperature 0, 16 at a time", "Temperature 1, 1 at a time", "prompts of 2048 tokens"):
        assert title in text
    arrivals = text.partition("Arrivals at a rate")[2]
    assert "p99 over plain's" in arrivals and "0.4 arrivals/s | lookup" in arrivals


def test_a_bar_in_a_name_does_not_end_a_cell():
    assert "| odd \\| name |" in markdown(made_up({**FACTORS, "odd | name": 1.1}))


# The page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_well_formed_and_loads_nothing():
    text = page(made_up(groups=EVERY))
    found = Page(text)
    assert all(link.startswith("#") for link in found.links)
    assert {link[1:] for link in found.links} <= found.anchors
    assert not {"script", "link", "img", "iframe", "object"} & set(found.tags)
    assert "://" not in text and "@import" not in text and "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_every_section_is_there_when_the_result_has_its_figures():
    names = "summary kinds concurrency depth acceptance reliability split latency arrivals utilisation proof control"
    found = Page(page(made_up(groups=EVERY)))
    assert {*names.split(), "machine", "rows", "definitions", "reproduce"} <= found.anchors
    for words in DEFINITIONS.values():
        assert " ".join(words.split()) in found.said()
    assert "dspark bench --target toy" in found.said()


def test_sections_without_figures_are_left_out():
    result = made_up(reliability=(), proofs=(), control=None)
    bare = tuple(replace(row, use=None, peak_memory_bytes=None, slot_marginal=(), histogram=()) for row in result.rows)
    result = replace(result, rows=bare, cells=tuple(replace(cell, counts=None) for cell in result.cells))
    found = Page(page(result))
    gone = {"concurrency", "depth", "acceptance", "reliability", "split", "arrivals", "utilisation", "proof", "control"}
    assert not gone & found.anchors
    assert {"summary", "kinds", "latency", "machine", "reproduce"} <= found.anchors


def test_a_result_without_any_row_is_still_a_page_and_a_table():
    result = replace(made_up(), rows=(), cells=(), proofs=(), control=None, complete=False, reliability=())
    assert "stopped before its end" in Page(page(result)).said()
    assert "stopped before its end" in markdown(result)


def test_axes_name_their_units():
    labels = Page(page(made_up(groups=EVERY))).labels
    units = ("(times)", "(%)", "(tokens)", "per second", "seconds", "milliseconds", "slot", "requests", "tokens")
    assert len(labels) > 20
    assert all(any(unit in label for unit in units) for label in labels)


def test_whatever_is_hostile_in_a_name_is_escaped():
    hostile = '"><script>alert(1)</script>&'
    result = made_up(
        {**FACTORS, hostile: 1.2},
        (Group(hostile, 0.0, 1), Group(hostile, 0.0, 2)),
        target_name=hostile,
        command=hostile,
        notes={hostile: hostile},
        skipped=(hostile,),
    )
    text = page(replace(result, machine=replace(result.machine, cpu=hostile, versions={hostile: hostile})))
    assert "script" not in Page(text).tags
    assert "<script" not in text


def test_a_restless_control_and_broken_promises_are_said_first():
    result = made_up({"plain": 1.0, "plain again": 1.1, "lookup": 1.4})
    proof = replace(result.proofs[0], partings=made_up().proofs[-1].partings)
    result = replace(result, proofs=(proof,))
    for text in (Page(page(result)).said().partition("Summary")[0], markdown(result).partition("|")[0]):
        assert "restless" in text and "beyond near-ties" in text


def test_differences_are_listed_with_their_gap():
    found = Page(page(made_up())).said()
    assert "2 differences" in found and "gap between the two (logits)" in found


def test_the_open_loop_compares_waiting_and_use_of_the_machine():
    found = Page(page(made_up(groups=EVERY))).said()
    arrivals = found.partition("Poisson arrivals:")[2]
    assert "p99 over plain's" in arrivals and "memory use" in arrivals


def test_numbers_survive_json_as_json():
    json.dumps(made_up(groups=EVERY).to_dict(), allow_nan=False)


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_browser_shows_it_without_errors_or_sideways_scrolling(browser, tmp_path, width, dark):
    path = write_report(made_up(groups=EVERY), tmp_path)[-1]
    browser.look(width, 900, dark)
    browser.driver.get(path.as_uri())
    assert browser.errors() == []
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth")
    colours = browser.run(
        "const s = getComputedStyle(document.body), t = getComputedStyle(document.querySelector('svg text'));"
        "return [s.backgroundColor, t.fill]"
    )
    shades = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours]
    assert (shades[0] < shades[1]) == dark
    assert browser.run("return [...document.querySelectorAll('svg.chart')].some(s => s.clientWidth > 250)")
