"""Does a server say with speculation what it says without? 100 prompts at concurrency 8, greedy and seeded.

    python benchmarks/served_identity.py [--model smollm2] [--limit 100] [--max-tokens 128] [--prompts DIR] > served.md
    python benchmarks/served_identity.py --exact -- --policy auto     what follows -- goes to dspark serve
    python benchmarks/served_identity.py --url http://127.0.0.1:8000  a server that runs; --model is what it serves

Prompts are taken in turn from the built-in workloads and from each JSONL file of --prompts (`turns`, `prompt` or
`messages`). Every answer is compared token by token with that of proposer `none`. For each that differs the gap between
the two tokens' scores is computed from the model's weights; one that is not a tie makes the script exit 1.
"""

import argparse
import asyncio
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does

import httpx  # noqa: E402

from dspark.cli.markdown import markdown_table  # noqa: E402
from dspark.config import SamplingParams  # noqa: E402
from dspark.errors import DsparkError  # noqa: E402
from dspark.measure import WORKLOADS, Difference, differences  # noqa: E402
from dspark.measure.prompts import prompt_sets  # noqa: E402

CHAT = "/v1/chat/completions"
DECODINGS = {"greedy": 0.0, "seeded, T=1": 1.0}
READY = re.compile(r"Serving .* on (http://\S+)")
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Answer:
    """What the server said to one prompt."""

    text: str
    tokens: tuple[bytes, ...]  # those that are shown; not the end token
    finish_reason: str
    completion_tokens: int
    numbers: dict[str, Any]  # the block `dspark`

    @classmethod
    def read(cls, body: dict[str, Any]) -> "Answer":
        choice = body["choices"][0]
        tokens = tuple(bytes(token["bytes"]) for token in choice["logprobs"]["content"])
        text, reason = choice["message"]["content"] or "", choice["finish_reason"]
        return cls(text, tokens, reason, body["usage"]["completion_tokens"], body["dspark"])

    @property
    def said(self) -> tuple[Any, ...]:
        return self.text, self.tokens, self.finish_reason, self.completion_tokens


@dataclass(frozen=True)
class Comparison:
    """One decoding of all prompts, with speculation and without."""

    name: str
    fast: list[Answer]
    plain: list[Answer]
    parted: list[Difference]  # `prompt` is the place among all prompts

    def faults(self) -> list[str]:
        wrong = [f"{self.name}, prompt {d.prompt}: no tie" for d in self.parted if not d.is_tie]
        if not total(self.fast, "verified"):
            wrong.append(f"{self.name}: nothing was drafted, so nothing was compared")
        if total(self.plain, "drafted"):
            wrong.append(f"{self.name}: proposer none has drafted")
        return wrong


def total(answers: Sequence[Answer], name: str) -> int:
    return sum(answer.numbers[name] for answer in answers)


def choose(folder: Path | None, limit: int) -> list[Messages]:
    """Prompts from all sets in turn."""
    sets = [[[{"role": "user", "content": text}] for text in texts] for texts in WORKLOADS.values()]
    if folder is not None:
        found = prompt_sets([folder], limit)
        sets += [[[dict(m) for m in prompt.messages] for prompt in prompts] for prompts in found.values()]
    in_turn = (prompt for several in zip_longest(*sets) for prompt in several if prompt is not None)
    return list(islice(in_turn, limit))


def request(messages: Messages, index: int, temperature: float, max_tokens: int) -> dict[str, Any]:
    """Every prompt has a seed of its own."""
    return {
        "messages": messages,
        "temperature": temperature,
        "seed": index,
        "max_tokens": max_tokens,
        "logprobs": True,
    }


async def ask(url: str, key: str | None, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Answer]:
    """Answers in the order of the requests. Raises DsparkError when one is refused."""
    free = asyncio.Semaphore(concurrency)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=3600) as http:
        models = await http.get("/v1/models")
        if models.status_code != 200:
            raise DsparkError(f"{url} answers /v1/models with status {models.status_code}; is the key set?")
        name = models.json()["data"][0]["id"]

        async def one(index: int, body: dict[str, Any]) -> Answer:
            async with free:
                response = await http.post(CHAT, json={"model": name, **body})
            if response.status_code != 200:
                raise DsparkError(f"Prompt {index} was answered with status {response.status_code}: {response.text}")
            return Answer.read(response.json())

        return await asyncio.gather(*(one(index, body) for index, body in enumerate(bodies)))


def compare(
    url: str, model: str, prompts: Sequence[Messages], max_tokens: int, concurrency: int = 8, exact: bool = False
) -> list[Comparison]:
    """Every decoding, with speculation first; the weights of `model` are loaded only where answers differ."""
    ties, comparisons = Ties(model, exact), []
    key = os.environ.get("DSPARK_API_KEY")
    for name, temperature in DECODINGS.items():
        bodies = [request(messages, i, temperature, max_tokens) for i, messages in enumerate(prompts)]
        answers = []
        for more in ({}, {"proposer": "none"}):
            begun_s = time.perf_counter()
            answers.append(asyncio.run(ask(url, key, [body | more for body in bodies], concurrency)))
            seconds = time.perf_counter() - begun_s
            print(f"{name}, {more.get('proposer', 'with speculation')}: {seconds:.0f} s", file=sys.stderr, flush=True)
        parted = [
            ties.difference(i, messages, fast, plain, SamplingParams(temperature=temperature, seed=i))
            for i, (messages, fast, plain) in enumerate(zip(prompts, *answers, strict=True))
            if fast.said != plain.said
        ]
        comparisons.append(Comparison(name, *answers, parted))
    return comparisons


class Ties:
    """Answers as token ids, and how near two that differ came to each other."""

    def __init__(self, model: str, exact: bool):
        self._model, self._exact = model, exact
        self._target: Any = None
        self._ids: dict[bytes, int] = {}

    def difference(
        self, index: int, messages: Messages, fast: Answer, plain: Answer, params: SamplingParams
    ) -> Difference:
        if self._target is None:
            self._load()
        tokenizer = self._target.tokenizer
        prompt = tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False)
        found = differences(self._target, [prompt], [self._read(fast)], [self._read(plain)], params)
        if not found:  # the same tokens, and yet another text, end or count
            return Difference(index, len(fast.tokens), -1, -1, float("inf"), 0.0)
        (one,) = found
        return Difference(index, one.position, one.token_a, one.token_b, one.gap, one.noise)

    def _read(self, answer: Answer) -> list[int]:
        end = [self._target.spec.eos_ids[0]] if answer.finish_reason == "stop" else []
        return [self._ids[token] for token in answer.tokens] + end

    def _load(self) -> None:
        from dspark.engine.setup import pick_device
        from dspark.serve.logprobs import token_bytes
        from dspark.target import load_target

        self._target = target = load_target(self._model, pick_device("auto"), exact=self._exact)
        # Of ids with the same bytes the first is taken, which for text is the usual one.
        for token_id in range(target.spec.vocab_size - 1, -1, -1):
            self._ids[token_bytes(target.tokenizer, token_id)] = token_id


def report(comparisons: Sequence[Comparison], command: str) -> str:
    """Markdown: the command, the counts, every difference, every fault."""
    rows = []
    for c in comparisons:
        ties = sum(d.is_tie for d in c.parted)
        steps = total(c.fast, "steps")
        rows.append(
            [
                c.name,
                f"{len(c.fast) - len(c.parted)} of {len(c.fast)}",
                f"{sum(a.completion_tokens for a in c.fast)}",
                str(ties),
                str(len(c.parted) - ties),
                f"{total(c.fast, 'committed') / steps:.2f}" if steps else "-",
                f"{total(c.fast, 'accepted')} of {total(c.fast, 'verified')}",
            ]
        )
    headers = ["decoding", "equal answers", "tokens", "part at a tie", "part otherwise", "AL", "drafts kept"]
    parts = [f"`{command}`", markdown_table(headers, rows)]
    if any(c.parted for c in comparisons):
        rows = [
            [c.name, str(d.prompt), str(d.position), f"{d.gap:.2g}", f"{d.noise:.2g}", "tie" if d.is_tie else "FAULT"]
            for c in comparisons
            for d in c.parted
        ]
        headers = ["decoding", "prompt", "token", "gap of the two scores", "kernel noise", ""]
        parts.append(markdown_table(headers, rows))
    parts += [f"FAULT: {fault}" for c in comparisons for fault in c.faults()]
    return "\n\n".join(parts)


@contextmanager
def server(model: str, more: Sequence[str]) -> Iterator[str]:
    """The address of a `dspark serve` in a process of its own. Raises DsparkError when it does not start."""
    command = [sys.executable, "-m", "dspark", "serve", "--model", model, "--port", "0", *more]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if ready := READY.search(line):
                break
        else:
            raise DsparkError("The server ended before it was ready; its last line above says why.")
        log = threading.Thread(target=lambda: sys.stderr.writelines(process.stderr), daemon=True)
        log.start()  # a pipe that nobody reads would fill up
        yield ready[1]
    finally:
        process.terminate()
        process.wait(60)


def main(argv: Sequence[str] | None = None) -> None:
    given = list(sys.argv[1:] if argv is None else argv)
    ours = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", help="a server that runs; its key is read from DSPARK_API_KEY")
    parser.add_argument("--prompts", type=Path, help="folder of JSONL files, beside the built-in prompts")
    parser.add_argument("--limit", type=int, default=100, help="prompts in all")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--exact", action="store_true", help="the server's exact mode, which has no ties")
    args = parser.parse_args(given[:ours])
    if args.limit < 1 or args.concurrency < 1:
        parser.error("--limit and --concurrency are 1 or more")
    try:
        prompts = choose(args.prompts, args.limit)
        options = (args.model, prompts, args.max_tokens, args.concurrency, args.exact)
        if args.url:
            found = compare(args.url, *options)
        else:
            with server(args.model, [*(["--exact"] if args.exact else []), *given[ours + 1 :]]) as url:
                found = compare(url, *options)
    except (DsparkError, httpx.HTTPError) as error:
        sys.exit(f"served_identity: {error}")
    print(report(found, shlex.join(["python", "benchmarks/served_identity.py", *given])), flush=True)
    sys.exit(any(c.faults() for c in found))


if __name__ == "__main__":
    main()
