"""The dashboard in a real browser; the toy server behind it is a real one too."""

import re
import threading
from dataclasses import replace

import httpx
import pytest

from dspark.serve import guard
from dspark.serve.dashboard import STATIC
from tests.serve.browser import chromium
from tests.serve.support import chat_request, completion_request, serving

PROMPT = "hello hello hello"
SEED = 0  # at temperature 1 the toy then speaks to the end, with tokens of every kind
ENTER, ESCAPE, TAB = "\ue007", "\ue00c", "\ue004"  # as WebDriver spells keys
SPANS = "return [...document.querySelectorAll('#single .step span')].map(s => [s.textContent, s.className])"


@pytest.fixture(scope="module")
def window():
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(window, running):
    """The dashboard, loaded and in touch with its server."""
    window.open(running.url)
    window.wait(lambda: "toy" in window.text("#about"))
    window.fill("#prompt", PROMPT)
    window.fill("#max-tokens", "40")
    yield window
    running.wait_until_idle()
    refusals = "the server responded with a status of 4"  # a console counts them as errors; tests look at them
    assert [line for line in window.errors() if refusals not in line] == []


@pytest.fixture
def gate(running, monkeypatch):
    """While it is closed, the engine stands still after the next five steps."""
    gate, real, left = threading.Event(), running.engine.step, [5]
    gate.set()

    def step():
        if not gate.is_set():
            left[0] -= 1
            assert left[0] >= 0 or gate.wait(30)
        return real()

    monkeypatch.setattr(running.engine, "step", step)
    yield gate
    gate.set()


def done(page):
    return page.text("#status").startswith("Done: ")


def say_all_pieces(events):
    return [[piece["text"], piece["kind"]] for event in events for piece in event.get("dspark", {}).get("pieces", [])]


def test_enter_asks_and_the_answer_shows_where_its_tokens_came_from(page, running):
    page.find("#prompt").send_keys(ENTER)
    page.wait(lambda: done(page))
    events = running.events(**chat_request(PROMPT, max_tokens=40, dspark={"pieces": True}))
    pieces, numbers = say_all_pieces(events), events[-1]["dspark"]
    assert page.run(SPANS) == pieces
    assert {"accepted", "recovered", "plain"} <= {kind for _, kind in pieces}
    assert f"{numbers['accepted']} of {numbers['verified']} verified guesses kept" in page.text("#single .facts")
    assert not page.find("#stop").is_enabled()


def test_tokens_are_seen_as_they_come_and_escape_ends_the_answer(page, running, gate):
    gate.clear()
    page.find("#send").click()
    page.wait(lambda: len(page.run(SPANS)) >= 3)  # the engine stands still in the midst of the answer
    assert page.text("#status") == "Decoding …" and page.find("#stop").is_enabled()
    before = running.metric("requests_total", outcome="abort")
    page.press(ESCAPE)
    page.wait(lambda: page.text("#status") == "Stopped.")
    gate.set()
    running.wait_until_idle()
    assert running.metric("requests_total", outcome="abort") == before + 1
    assert page.run("return document.activeElement.id") == "prompt"


def test_a_text_can_be_gone_on_with_and_every_control_reaches_the_request(page, running):
    page.run("document.getElementById('mode').value = 'completion'")
    page.run("document.getElementById('proposer').value = 'none'")
    page.fill("#temperature", "0.9")
    page.fill("#seed", "12")
    page.find("#send").click()
    page.wait(lambda: done(page))
    answer = running.post("/v1/completions", **completion_request(PROMPT, temperature=0.9, seed=12, max_tokens=40))
    assert page.text("#single .text") == answer.json()["choices"][0]["text"]
    assert {kind for _, kind in page.run(SPANS)} == {"plain"}


def race(page, seed=str(SEED)):
    page.fill("#temperature", "1")
    page.fill("#seed", seed)
    page.find("#race").click()
    page.wait(lambda: page.text("#status").startswith("The texts"))
    return [page.text(f"#double article:nth-child({child}) .text") for child in (1, 2)]


def test_a_race_decodes_the_same_seeded_prompt_twice_and_compares(page, running):
    plain, fast = race(page)
    assert plain == fast == seeded_answer(running, SEED)
    kinds = [
        page.run("return [...document.querySelectorAll(arguments[0])].map(s => s.className)", f"#double {side} .step *")
        for side in (":first-child", ":last-child")
    ]
    assert set(kinds[0]) == {"plain"} and "accepted" in kinds[1]
    said = page.text("#status")
    assert f"The texts are equal, all {len(plain)} characters." in said and "equal" in page.find(
        "#status"
    ).get_attribute("class")
    with_, without, ratio = map(float, re.findall(r"\d+\.\d+", said))
    assert ratio == pytest.approx(with_ / without, rel=0.02, abs=0.01)  # all three are rounded
    assert page.text("#double article:nth-child(2) .speed") == f"{with_} tokens/s"


def test_a_race_without_a_seed_draws_one_and_shows_it(page, running):
    plain, fast = race(page, seed="")
    seed = int(page.find("#seed").get_property("value"))
    assert plain == fast == seeded_answer(running, seed)
    assert page.text("#status").startswith("The texts are equal")


def seeded_answer(running, seed):
    body = running.chat(PROMPT, temperature=1, seed=seed, max_tokens=40).json()
    return body["choices"][0]["message"]["content"]


def test_a_race_notices_texts_that_differ(page, running, monkeypatch):
    right = [seeded_answer(running, seed) for seed in (SEED, SEED + 1)]
    real = running.engine.add

    def add(prompt, params, choice, on_chunk, speculate, policy):
        """Wrong: drafts change what is said."""
        return real(prompt, replace(params, seed=params.seed + speculate), choice, on_chunk, speculate, policy)

    monkeypatch.setattr(running.engine, "add", add)
    plain, fast = race(page)
    assert [plain, fast] == right
    at = next(i for i, (a, b) in enumerate(zip(plain, fast, strict=False)) if a != b)
    assert page.text("#status").startswith(f"The texts differ after {at} characters:")
    assert page.find("#status").get_attribute("class") == "different"


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", "-1"), ("temperature", "hot"), ("seed", str(2**63)), ("max-tokens", "1.5")]
)
def test_what_the_server_refuses_is_said_in_its_words(page, running, field, value):
    page.fill(f"#{field}", value)
    page.find("#send").click()
    page.wait(lambda: page.text("#fault"))
    wrong = float(value) if value in ("-1", "1.5") else value
    refused = running.chat(**{field.replace("-", "_"): wrong})
    assert refused.status_code == 400 and page.text("#fault") == refused.json()["error"]["message"]
    assert page.text("#status") == ""
    page.fill(f"#{field}", "3")
    page.find("#send").click()
    page.wait(lambda: done(page) and not page.find("#fault").is_displayed())


def test_a_key_is_asked_for_when_it_is_missing(window, make_engine, monkeypatch):
    real = guard.check_key
    with serving(make_engine(), api_key="open sesame") as running:
        assert running.client.get("/", headers={"authorization": ""}).status_code == 401
        window.open(running.url.replace("://", "://me:open%20sesame@"))  # the browser asks and sends it by itself
        window.wait(lambda: "toy" in window.text("#about"))
        assert not window.find("#key-form").is_displayed()
    # Behind a proxy, perhaps, that guards or serves the page itself.
    monkeypatch.setattr(guard, "check_key", lambda *args: real(*args) if args[2].startswith("/v1/") else None)
    with serving(make_engine(), api_key="sesame") as running:
        window.open(running.url)
        window.wait(lambda: window.find("#key-form").is_displayed())
        assert "API key" in window.text("#fault")
        window.fill("#key", "sesame")
        window.find("#key").send_keys(ENTER)
        window.wait(lambda: "toy" in window.text("#about") and not window.find("#key-form").is_displayed())
        window.fill("#max-tokens", "4")
        window.find("#send").click()
        window.wait(lambda: done(window))


def test_the_charts_say_what_the_state_says(page, running, monkeypatch):
    monkeypatch.setattr("dspark.serve.state.WINDOW_S", 1000.0)
    page.find("#send").click()
    page.wait(lambda: done(page))
    running.wait_until_idle()
    state = running.client.get("/v1/dspark/state").json()
    label = lambda chart: page.find(f"#{chart}-chart").get_attribute("aria-label")  # noqa: E731
    page.wait(lambda: label("verify") == f"tokens per request: {state['verify_length']:g}")
    assert label("batch") == f"requests per step: {state['batch_size']:g}"
    shares = re.findall(r"(\d): (\d+) %", label("slot"))
    assert [int(slot) for slot, _ in shares] == [1, 2, 3, 4, 5]
    assert [int(share) for _, share in shares] == pytest.approx([100 * s for s in state["slot_acceptance"]], abs=0.6)
    assert page.text("[data-figure=acceptance_length]") == f"{state['acceptance_length']:.2f}"


def test_every_colour_can_be_read_and_nothing_is_cut_whatever_the_window(page):
    race(page)
    for width, dark in ((360, False), (360, True), (1100, True), (1100, False)):
        page.look(width, dark=dark)
        assert page.run("return document.documentElement.scrollWidth") <= width
        assert page.run("return matchMedia('(prefers-color-scheme: dark)').matches") == dark
        for selector in (".accepted", ".recovered", ".bonus", ".plain", ".facts", "#status", "dt", ".main"):
            assert contrast(page, selector) >= 4.5, (selector, width, dark)
    lines = page.run("""return ['accepted', 'recovered', 'bonus', 'plain'].map(kind => {
        const style = getComputedStyle(document.querySelector('.' + kind));
        return style.textDecorationLine + style.textDecorationStyle})""")
    assert len(set(lines)) == 4


def contrast(window, selector):
    """WCAG's ratio between a text's colour and what is behind it."""

    def luminance(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    colours = window.run(
        """const clear = 'rgba(0, 0, 0, 0)', found = document.querySelector(arguments[0]);
        let back = found;
        while (getComputedStyle(back).backgroundColor === clear) back = back.parentElement;
        return [getComputedStyle(found).color, getComputedStyle(back).backgroundColor]""",
        selector,
    )
    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)


def test_the_keyboard_reaches_every_control_in_order_and_all_have_names(page):
    page.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    page.find("#prompt").click()
    seen = ["prompt"]
    for _ in range(8):
        page.press(TAB)
        seen.append(page.run("return document.activeElement.id"))
    assert seen == ["prompt", "mode", "temperature", "seed", "max-tokens", "proposer", "policy", "send", "race"]
    unnamed = page.run("""return [...document.querySelectorAll('input, select, textarea')]
        .filter(field => !field.labels.length).map(field => field.id)""")
    assert unnamed == []


def test_the_page_loads_nothing_from_elsewhere_and_runs_no_inline_script(running):
    page = httpx.get(running.url)
    assert page.headers["content-security-policy"].startswith("default-src 'self';")
    files = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {"static/app.js", "static/style.css", "static/icon.svg"} <= set(files)
    for name in [path.name for path in STATIC.iterdir()]:
        served = httpx.get(f"{running.url}/static/{name}")
        assert served.status_code == 200 and served.headers["x-content-type-options"] == "nosniff"
        urls = set(re.findall(r"https?://[^\"' )]+", served.text)) - {"http://www.w3.org/2000/svg"}
        assert urls == set() and "innerHTML" not in served.text, name
    assert re.findall(r"<script(?! type=\"module\" src)|style=| on\w+=", page.text) == []
