"""The command line on a toy model: what it prints, what it refuses, and how it ends."""

import os
import platform
import re
import signal
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from dspark.cli import show
from dspark.config import SamplingParams
from dspark.drafter import random_tensors
from dspark.drafter.checkpoint import save_drafter
from dspark.engine import Chunk, Engine
from dspark.engine.text import Piece
from tests.engine.support import drafter_config
from tests.sentences import assert_one_sentence
from tests.toy_models import write_model

PROMPT = "hello hello hello"
COLOURS = {"32": "accepted", "33": "recovered", "36": "bonus"}
ESCAPES = re.compile(r"\x1b\[([0-9;]*)m")


def answer(engine, prompt=PROMPT, raw=False, **params):
    """What the library says to the same prompt."""
    ids = engine.target.tokenizer.encode(prompt) if raw else engine.chat_ids([{"role": "user", "content": prompt}])
    return engine.generate([ids], SamplingParams(**{"temperature": 0, "max_tokens": 60, **params}))[0]


def process(*args, **options):
    """A real process, so that start-up, streams and signals are the user's own."""
    return subprocess.Popen(
        [sys.executable, "-m", "dspark.cli.main", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONUTF8": "1"},
        **options,
    )


# Answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("raw", [False, True])
def test_streamed_answer_is_the_librarys(raw, generate, engine):
    result = generate(PROMPT, "--max-tokens", "60", *(["--raw"] if raw else []))
    expected = answer(engine, raw=raw)
    assert (result.code, result.out) == (0, expected.text + "\n")
    assert expected.text != answer(engine, raw=not raw).text


def test_prompt_from_standard_input(generate, engine):
    assert generate("-", "--raw", "--max-tokens", "60", stdin=PROMPT).out == answer(engine, raw=True).text + "\n"


def test_seeds_repeat_and_differ(generate, engine):
    def sampled(seed, *more):
        return generate(PROMPT, "--temperature", "1", "--seed", seed, "--max-tokens", "40", *more).out

    expected = answer(engine, temperature=1, seed=7, max_tokens=40).text + "\n"
    assert sampled("7") == sampled("7", "--proposer", "none") == expected
    assert sampled("8") != expected


@pytest.mark.parametrize("option", [{"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.3}, {"repetition_penalty": 5.0}])
def test_sampling_option_reaches_the_engine(option, generate, engine):
    ((name, value),) = option.items()
    common = {"temperature": 0.9, "seed": 2, "max_tokens": 30}
    expected = answer(engine, **common, **option)
    args = ["--temperature", "0.9", "--seed", "2", "--max-tokens", "30"]
    assert generate(PROMPT, *args, f"--{name.replace('_', '-')}", str(value)).out == expected.text + "\n"
    assert expected.text != answer(engine, **common).text


def test_stop_and_system_and_ignore_eos_reach_the_engine(generate, engine):
    whole = answer(engine).text
    stop = whole[10:13]
    assert generate(PROMPT, "--stop", "never said", "--stop", stop).out == whole[: whole.index(stop)] + "\n"
    ids = engine.chat_ids([{"role": "system", "content": "Kurz."}, {"role": "user", "content": PROMPT}])
    expected = engine.generate([ids], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0]
    assert generate(PROMPT, "--system", "Kurz.", "--max-tokens", "30", "--ignore-eos").out == expected.text + "\n"
    assert expected.text != answer(engine, max_tokens=30).text


def test_text_is_printed_as_it_is(capsys):
    """Tabs, carriage returns and long runs of blanks stay; so does what looks like markup."""
    pieces = ["\tif x:\r\n", "\x0c[red]", " " * 300, "\n\n", "日本\u200d🙂\x07", "[/]\n"]
    for colours in (False, True):
        show.show_stream([Chunk(tuple(Piece(p, "accepted") for p in pieces), ())], colours)
        assert capsys.readouterr().out == "".join(pieces) + "\n"


def test_stats_are_the_requests_own(generate, engine):
    result = generate(PROMPT, "--stats", "--max-tokens", "60")
    expected, shown = answer(engine), " ".join(result.err.split())
    stats = expected.stats
    assert stats.accepted > 0
    assert result.out == expected.text + "\n"
    assert f"acceptance length {stats.acceptance_length:.2f} tokens per step ({stats.steps} steps)" in shown
    assert f"{stats.drafted} drafted, {stats.verified} verified, {stats.accepted} accepted" in shown
    assert f"({len(expected.token_ids)} tokens, " in shown
    slots = " ".join(f"{a / v:.0%}" for a, v in zip(stats.slot_accepted, stats.slot_verified, strict=True))
    assert f"accepted per slot {slots} " in shown
    assert all(f"{source} {count}" in shown for source, count in stats.sources.items())
    assert all(part in shown for part in ("draft", "verify", "host", "prompt"))


def test_stats_of_one_token(generate):
    result = generate(PROMPT, "--stats", "--max-tokens", "1")
    assert result.code == 0 and "(0 steps)" in result.err and "no drafts" in result.err


def test_show_drafts_colours_each_token_by_its_origin(generate, engine, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    colourful = {"force_terminal": True, "color_system": "standard", "highlight": False, "soft_wrap": True}
    monkeypatch.setattr(show, "out", Console(**colourful))
    monkeypatch.setattr(show, "err", Console(stderr=True, **colourful))
    result = generate(PROMPT, "--show-drafts", "--max-tokens", "60")
    ids = engine.chat_ids([{"role": "user", "content": PROMPT}])
    expected = dict.fromkeys(("accepted", "recovered", "bonus", "plain"), "")
    for chunk in engine.stream(ids, SamplingParams(temperature=0, max_tokens=60)):
        for piece in chunk.pieces:
            expected[piece.kind] += piece.text
    shown = dict.fromkeys(expected, "")
    kind = "plain"
    for i, part in enumerate(ESCAPES.split(result.out.removesuffix("\n"))):
        if i % 2:
            kind = COLOURS.get(part, "plain")
        else:
            shown[kind] += part
    assert shown == expected and all(expected.values())
    assert all(f"\x1b[{code}m{kind}" in result.err for code, kind in COLOURS.items())
    assert "\x1b" not in generate(PROMPT, "--max-tokens", "60").out


@pytest.mark.parametrize("options", [[], ["--temperature", "1", "--seed", "3"], ["--temperature", "1"]])
def test_compare_says_equal(options, generate, engine):
    result = generate(PROMPT, "--compare", "--max-tokens", "40", *options)
    assert result.code == 0
    assert re.search(r"^\d+ tokens, equal to plain decoding", result.err)
    assert ("(seed 3)" in result.err) == ("3" in options)
    assert ("(seed " in result.err) == bool(options)
    if "--seed" not in options and options:  # the seed it drew repeats the answer
        seed = int(re.search(r"\(seed (\d+)\)", result.err)[1])
        assert result.out == answer(engine, temperature=1, seed=seed, max_tokens=40).text + "\n"


def test_compare_says_different_and_where(generate, engine, tmp_path, monkeypatch):
    other = Engine.from_pretrained(str(write_model(tmp_path / "other", "qwen3", seed=5)), proposer="none")
    monkeypatch.setattr(Engine, "without_drafts", lambda self: other)
    result = generate(PROMPT, "--compare", "--max-tokens", "40")
    at = next(
        i
        for i, pair in enumerate(
            zip(answer(engine, max_tokens=40).token_ids, answer(other, max_tokens=40).token_ids, strict=False)
        )
        if len(set(pair)) == 2
    )
    assert result.code == 0
    assert "different from plain decoding" in result.err and f"They part at token {at}." in result.err


# Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["hi", "--temperature", "-1"], ["temperature", "-1"]),
        (["hi", "--temperature", "nan"], ["temperature", "nan"]),
        (["hi", "--top-p", "0"], ["top_p", "0"]),
        (["hi", "--top-k", "-3"], ["top_k", "-3"]),
        (["hi", "--min-p", "2"], ["min_p", "2"]),
        (["hi", "--repetition-penalty", "0"], ["repetition_penalty"]),
        (["hi", "--max-tokens", "0"], ["max_tokens", "0"]),
        (["hi", "--seed", "-1"], ["seed", "-1"]),
        (["hi", "--stop", ""], ["stop"]),
        (["hi", "--proposer", "magic"], ["'magic'", "lookup"]),
        (["hi", "--proposer", "model:/no/such/model"], ["/no/such/model"]),
        (["hi", "--policy", "fixed:0"], ["'fixed:0'", "16"]),
        (["hi", "--policy", "never"], ["'never'", "fixed:N"]),
        (["hi", "--device", "tpu"], ["'tpu'", "cpu"]),
        (["hi", "--dtype", "int4"], ["'int4'", "float32"]),
        (["hi", "--threads", "0"], ["threads", "0"]),
        (["hi", "--kv-gb", "0"], ["kv_gb", "0"]),
        (["hi", "--kv-gb", "0.0002"], ["cache", "--kv-gb"]),
        (["hi", "--model", "/no/such/model"], ["/no/such/model"]),
        (["hi", "--proposer", "dspark", "--drafter", "/no/such/drafter"], ["/no/such/drafter"]),
        (["hi", "--proposer", "dspark"], ["--drafter"]),
        (["hi", "--system", "long " * 200], ["1031", "512"]),
        (["word " * 200], ["512"]),
        (["word " * 200, "--raw"], ["1000", "512"]),
        ([""], ["prompt is empty"]),
        ([" \n"], ["prompt is empty"]),
        (["-"], ["prompt is empty"]),
        (["hi \udcff"], ["UTF-8"]),
        (["hi", "--bogus"], ["--bogus", "--help"]),
        (["hi", "--top-k", "few"], ["--top-k", "integer"]),
        (["hi", "there"], ["there"]),
        ([], ["prompt"]),
    ],
    ids=lambda value: " ".join(value)[:40] or "nothing" if isinstance(value, list) else "",
)
def test_mistake_is_one_line_and_exit_2(args, names, generate):
    result = generate(*args)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("dspark: error: ") and result.err.endswith("\n")
    assert_one_sentence(result.err.removeprefix("dspark: error: ")[:-1], names)


def test_unknown_command_and_none(run):
    result = run("translate")
    assert result.code == 2
    assert_one_sentence(result.err.strip(), ["dspark: error:", "translate", "--help"])
    nothing, asked = run(), run("--help")
    assert nothing == asked and nothing.code == 0 and "generate" in nothing.out


def test_prompt_that_is_not_utf8(generate):
    result = generate("-", stdin=b"caf\xe9")
    assert (result.code, result.out) == (2, "")
    assert_one_sentence(result.err.strip(), ["dspark: error:", "UTF-8"])


def test_cache_that_does_not_fit_into_memory(generate, monkeypatch):
    monkeypatch.setattr(Engine, "from_pretrained", lambda **settings: torch.empty(2**50))
    result = generate("hi")
    assert (result.code, result.out) == (2, "")
    assert_one_sentence(result.err.strip(), ["dspark: error:", "memory", "--kv-gb"])


def test_a_bug_is_not_called_a_mistake(generate, monkeypatch):
    def fail(**settings):
        raise RuntimeError("ours")

    monkeypatch.setattr(Engine, "from_pretrained", fail)
    with pytest.raises(RuntimeError, match="ours"):
        generate("hi")


def test_mistake_in_a_real_process():
    with process("generate", " ") as running:
        out, err = running.communicate(timeout=120)
    assert (running.returncode, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("dspark: error: ")


# Conversations ----------------------------------------------------------------------------------------------------


@pytest.fixture
def chat(run, model, monkeypatch):
    """`dspark chat` fed with lines; gives its result and the conversations it asked the engine about."""
    asked = []
    encode = Engine.chat_ids

    def chat_ids(self, messages):
        asked.append([(m["role"], m["content"]) for m in messages])
        return encode(self, messages)

    monkeypatch.setattr(Engine, "chat_ids", chat_ids)

    def call(*lines, args=(), end="\n"):
        options = ["--model", model, "--proposer", "lookup", "--exact", "--max-tokens", "20", *args]
        return run("chat", *options, stdin="\n".join(lines) + end), asked

    return call


def reply(engine, messages):
    ids = engine.chat_ids([{"role": role, "content": content} for role, content in messages])
    return engine.generate([ids], SamplingParams(temperature=0, max_tokens=20))[0].text


def test_second_turn_knows_the_first(chat, engine):
    result, asked = chat("one", "", "two", "/exit", "three")
    first = reply(engine, [("user", "one")])
    conversation = [("user", "one"), ("assistant", first), ("user", "two")]
    assert asked[:2] == [[("user", "one")], conversation]
    assert (result.code, result.out) == (0, f"> {first}\n> > {reply(engine, conversation)}\n> ")


def test_reset_starts_over_and_keeps_the_system_message(chat):
    result, asked = chat("one", "/reset", "two", args=["--system", "Kurz."])
    assert asked == [[("system", "Kurz."), ("user", "one")], [("system", "Kurz."), ("user", "two")]]
    assert result.code == 0  # and the end of the input ends it


def test_question_too_long_for_the_context_does_not_end_the_chat(chat):
    result, asked = chat("word " * 200, "two", "/exit")
    assert result.code == 0 and "512" in result.err and "/reset" in result.err and result.err.count("\n") == 1
    assert asked[-1] == [("user", "two")]


def test_ctrl_c_cuts_an_answer_short_and_the_chat_goes_on(chat, engine, monkeypatch):
    stream = Engine.stream

    def interrupted(self, ids, params):
        yield next(c for c in stream(self, ids, params) if c.text)
        monkeypatch.setattr(Engine, "stream", stream)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", interrupted)
    result, asked = chat("one", "two", "/exit")
    assert asked == [[("user", "one")], [("user", "two")]]  # half an answer is not part of the conversation
    cut, second = re.fullmatch(r"> (.*)\n> (.*)\n> ", result.out, re.DOTALL).groups()
    assert cut and reply(engine, [("user", "one")]).startswith(cut)
    assert (result.code, second) == (0, reply(engine, [("user", "two")]))


def test_mistake_before_the_chat_begins(chat):
    result, _ = chat("one", args=["--temperature", "-1"])
    assert (result.code, result.out) == (2, "")
    assert_one_sentence(result.err.strip(), ["dspark: error:", "temperature"])


# Interruptions ----------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_was_printed(tmp_path):
    folder = str(write_model(tmp_path / "long", "qwen3", layer_scale=0.06, max_position_embeddings=16384))
    options = ["--model", folder, "--proposer", "none", "--dtype", "float32", "--threads", "1", "--ignore-eos"]
    # A shell's background job ignores Ctrl-C, and its children inherit that.
    heeds = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    with process("generate", PROMPT, *options, "--max-tokens", "16000", **heeds) as running:
        try:
            out = running.stdout.read(1)
            running.send_signal(signal.SIGINT)
            more, err = running.communicate(timeout=120)
        finally:
            running.kill()
    engine = Engine.from_pretrained(folder, proposer="none", dtype="float32", kv_gb=0.1)
    expected = answer(engine, max_tokens=100, ignore_eos=True).text
    printed = (out + more).removesuffix("\n")
    assert (running.returncode, err) == (130, "")
    assert printed and (expected.startswith(printed) or printed.startswith(expected))


def test_reader_that_leaves_ends_it_quietly(model):
    options = ["--model", model, "--proposer", "none", "--threads", "1", "--ignore-eos", "--max-tokens", "300"]
    with process("generate", PROMPT, *options) as running:
        running.stdout.close()
        err = running.stderr.read()
        running.wait(timeout=120)
    assert err == ""


# Other commands ---------------------------------------------------------------------------------------------------


def test_help_does_not_wait_for_torch():
    code = """
import sys
from dspark.cli.main import main
for args in (["--help"], ["--version"], *([c, "--help"] for c in ("generate", "chat", "doctor"))):
    sys.argv = ["dspark", *args]
    try:
        main()
    except SystemExit as stopped:
        assert not stopped.code, args
print([name for name in ("torch", "tokenizers", "numpy", "huggingface_hub") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stdout.count("Usage: ") == 4


def test_doctor_says_what_is_here(run, tmp_path):
    result = run("doctor")
    shown = dict(re.findall(r"^(\w[\w -]*?) {2,}(.+)$", result.out, re.MULTILINE))
    assert result.code == 0
    assert (shown["python"], shown["torch"]) == (platform.python_version(), torch.__version__)
    assert shown["threads"] == str(torch.get_num_threads())
    assert "cpu" in shown["device"] or torch.cuda.is_available()
    assert str(tmp_path / "cache") in result.out


def test_doctor_warns_of_what_slows_decoding(run, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    torch.set_num_threads(os.cpu_count() + 1)
    warnings = [line for line in run("doctor").out.splitlines() if line.startswith("! ")]
    assert sum("OMP_WAIT_POLICY=active" in w for w in warnings) == 1
    assert sum("99.0" in w for w in warnings) == 1
    assert sum("--threads" in w for w in warnings) == 1


def test_drafter_options_reach_the_engine(run, model, engine, tmp_path):
    config = drafter_config(engine.target)
    save_drafter(tmp_path / "drafter", config, random_tensors(config, seed=1))
    options = ["--model", model, "--exact", "--drafter", str(tmp_path / "drafter"), "--max-tokens", "30", "--stats"]
    result = run("generate", PROMPT, "--policy", "fixed:4", *options)
    assert result.code == 0 and re.search(r"draft sources +.*dspark \d+", result.err)
    assert result.out == answer(engine, max_tokens=30).text + "\n"
