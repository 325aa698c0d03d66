"""Whole runs on a toy model: what is proved, what a stop keeps, what a server or another engine answers."""

import importlib.util
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dspark.errors import DataError, DsparkError, SettingsError
from dspark.measure.bench import session
from dspark.measure.bench.modes import parse_modes
from dspark.measure.bench.ours import OurSystem
from dspark.measure.bench.records import CONTROL, PLAIN, Peaks, Settings
from dspark.measure.bench.session import JOURNAL_FILE, Request, run_bench
from tests.sentences import assert_one_sentence
from tests.toy_models import write_model

QUESTIONS = {
    "code": [({"role": "user", "content": text},) for text in ("Say a.", "Say it again.", "Say b.")],
}


class Silent:
    """Watches and counts; `stop_after` so many cells presses Ctrl-C."""

    def __init__(self, stop_after=None):
        self.cells, self.said, self.begun, self.stop_after = [], [], [], stop_after

    def planned(self, cells):
        pass

    def begins(self, turn):
        self.begun.append(turn)
        if self.stop_after is not None and len(self.begun) > self.stop_after:
            raise KeyboardInterrupt

    def ended(self, cell):
        self.cells.append(cell)

    def says(self, sentence):
        self.said.append(sentence)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("bench"), "qwen3", layer_scale=0.06))


@pytest.fixture(autouse=True)
def no_peaks(monkeypatch):
    """Measuring the machine takes longer than a toy run."""
    monkeypatch.setattr(session, "measure_peaks", lambda device: Peaks(1e9, 1e9))


@pytest.fixture
def request_of(model, tmp_path, cache):
    def call(modes=("lookup/fixed:4",), optional=(), resume=False, **changes):
        values = {"temperatures": (0.0,), "concurrencies": (2,), "depths": (0,), "rounds": 1, **changes}
        values = {"max_tokens": 12, "min_tokens": 30, "dtype": "float32", "threads": 1, **values}
        settings = Settings(model, (), ("code",), **values)
        parsed = tuple(parse_modes(list(modes)))
        return Request(
            settings, parsed, frozenset(optional), QUESTIONS, tmp_path / "out", resume, "none", "dspark bench"
        )

    return call


def test_a_run_measures_proves_and_explains(request_of):
    modes = ("lookup/fixed:4", "dspark-random/fixed:3")
    result = run_bench(request_of(modes, temperatures=(0.0, 1.0), exact=True, max_tokens=40), Silent())
    assert result.complete and result.settings.modes == (PLAIN, CONTROL, *modes)
    assert len(result.cells) == len(result.rows) == 8
    for row in result.rows:
        assert row.equal == ("" if row.mode == PLAIN else "yes"), row
        assert row.tokens >= 30 and row.use is not None and row.use.bytes_share is not None
    rows = {(row.mode, row.group.temperature): row for row in result.rows}
    assert rows[PLAIN, 0.0].acceptance_length == 1.0 and rows[PLAIN, 0.0].speedup is None
    assert rows["lookup/fixed:4", 0.0].acceptance_length > 1.3, "greedy text of this toy repeats itself"
    assert 0 < rows["dspark-random/fixed:3", 0.0].draft_share < 1
    assert result.notes == {"dspark-random/fixed:3": "a drafter of random weights"}
    assert result.control is not None and result.control.ratio.rounds == 2
    assert {proof.compared for proof in result.proofs} == {len(result.cells[0].requests)}
    assert any(each.mode == "dspark-random/fixed:3" for each in result.reliability)


def test_an_engine_that_says_something_else_is_found_out(request_of, monkeypatch):
    honest = OurSystem.step

    def lying(self):
        events = honest(self)
        if self.engine.proposer.name != "lookup":
            return events
        return [replace(e, token_ids=(*e.token_ids[:5], 7, *e.token_ids[6:])) if e.token_ids else e for e in events]

    monkeypatch.setattr(OurSystem, "step", lying)
    result = run_bench(request_of(), Silent())
    (proof,) = [proof for proof in result.proofs if proof.mode == "lookup/fixed:4"]
    assert proof.equal == 0 and not proof.kept
    parting = proof.partings[0]
    assert parting.position == 5 and parting.gap is not None and parting.noise is not None and not parting.tie
    assert [row.equal for row in result.rows] == ["", "yes", "no"]


def test_ctrl_c_keeps_what_is_done_and_resume_goes_on(request_of):
    one = {"concurrencies": (1,)}
    result = run_bench(request_of(**one), Silent(stop_after=5))
    assert not result.complete and [cell.mode for cell in result.cells] == [PLAIN, CONTROL, "lookup/fixed:4"]
    assert {len(cell.requests) for cell in result.cells} == {1}, "the second part was not whole"
    assert len(result.rows) == 3 and len(result.proofs) == 2
    watcher = Silent()
    whole = run_bench(request_of(resume=True, **one), watcher)
    assert whole.complete and len(whole.cells) == 3 and {len(cell.requests) for cell in whole.cells} == {3}
    assert [cell.requests[:1] for cell in whole.cells] == [cell.requests for cell in result.cells]
    assert [turn.mode for turn in watcher.begun] == [PLAIN, "lookup/fixed:4", PLAIN, CONTROL]


def test_a_folder_with_a_run_in_it_is_not_overwritten(request_of):
    run_bench(request_of(modes=()), Silent())
    with pytest.raises(DataError) as error:
        run_bench(request_of(modes=()), Silent())
    assert_one_sentence(error.value, ["--resume", "--out"])
    with pytest.raises(DataError) as error:
        run_bench(request_of(modes=(), resume=True, max_tokens=13), Silent())
    assert_one_sentence(error.value, ["max_tokens"])


def test_modes_that_cannot_run_are_refused_or_left_out(request_of, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError) as error:
        run_bench(request_of(modes=("vllm",)), Silent())
    assert_one_sentence(error.value, ["vllm", "install"])
    with pytest.raises(DsparkError) as error:
        run_bench(request_of(modes=("dspark/fixed:4",)), Silent())
    assert_one_sentence(error.value, ["drafter"])
    (tmp_path / "out" / JOURNAL_FILE).unlink(missing_ok=True)
    names = ("vllm", "dspark/fixed:4")
    result = run_bench(request_of(modes=names, optional=names), Silent())
    assert [row.mode for row in result.rows] == [PLAIN, CONTROL]
    assert [sentence.split()[0] for sentence in result.skipped] == ["vllm", "dspark/fixed:4"]


def test_open_loop_at_what_plain_sustains(request_of):
    result = run_bench(request_of(rates=(50.0,), rate_share=5.0), Silent())
    arrivals = [row for row in result.rows if row.group.rate is not None]
    assert len({row.group.rate for row in arrivals}) == 2 and len(arrivals) == 6
    assert all(row.equal == "yes" for row in arrivals if row.mode != PLAIN)
    requests = next(cell for cell in result.cells if cell.group.rate == 50.0).requests
    due = [request.arrival_s for request in requests]
    assert due == sorted(due) and due[0] == 0.0 and len(set(due)) == len(due)


def test_transformers_says_the_same_one_request_at_a_time(request_of):
    pytest.importorskip("transformers")
    modes = ("transformers", "transformers-lookup")
    result = run_bench(request_of(modes, concurrencies=(1, 2), rounds=1), Silent())
    places = {(row.mode, row.group.concurrency): row for row in result.rows}
    assert {c for mode, c in places if mode in modes} == {1}
    for mode in modes:
        row = places[mode, 1]
        assert row.equal == "yes" and row.ttft_ms is not None and row.acceptance_length is None
        assert "one request at a time" in row.note


class Stub(BaseHTTPRequestHandler):
    """Two words a stream, and the count of a third token that has no text."""

    def do_GET(self):
        self._send("application/json", json.dumps({"data": [{"id": "some-model"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "some-model" and body["stream_options"] == {"include_usage": True}
        chunks = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        chunks += [{"choices": [{"delta": {"content": word}}]} for word in ("one", "two")]
        chunks += [
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"completion_tokens": 3}},
        ]
        self._send("text/event-stream", "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n")

    def _send(self, kind, text):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = HTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


def test_any_openai_compatible_server_by_url(request_of, server):
    pytest.importorskip("httpx")
    mode = f"openai:{server}"
    result = run_bench(request_of(modes=(mode,)), Silent())
    (cell,) = [cell for cell in result.cells if cell.mode == mode]
    assert {r.output_tokens for r in cell.requests} == {3} and {r.finish_reason for r in cell.requests} == {"stop"}
    assert all(r.ttft_s is not None and len(r.gaps_ms) == 1 for r in cell.requests)
    assert {row.mode: row.equal for row in result.rows}[mode] == ""


def test_a_server_that_is_not_there_is_one_sentence(request_of):
    pytest.importorskip("httpx")
    with pytest.raises(SettingsError) as error:
        run_bench(request_of(modes=("openai:http://127.0.0.1:9",)), Silent())
    assert_one_sentence(error.value, ["127.0.0.1:9", "start it"])
