"""What lookup keeps on texts the target wrote before: no model pass, so a setting costs seconds.

    python benchmarks/lookup_simulation.py --data data/*.npz
    python benchmarks/lookup_simulation.py --data data/*.npz --max-mb 1 --drafts 8

The table is counted on the training side of the prompts and measured on the held-out side. Texts are replayed through
the engine's own proposer: a draft token is kept where the text goes on with it, which is what verification decides for
guesses that are certain, under both acceptance rules. Speed-ups divide tokens by the cost of passes of 1, 2, ... tokens
(`--costs`, in units of a plain step); drafting and host time are not in them.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dspark.artifacts.table import CorpusTable
from dspark.config import SamplingParams
from dspark.data import Corpus, Described, cut_loops, hold_out, read_corpus
from dspark.data.table import TableSettings, count_table
from dspark.engine.lookup import LookupGuess, LookupProposer, table_chain
from dspark.engine.request import Request
from dspark.engine.text import TextStream

Guess = Callable[[LookupProposer, Request, int], LookupGuess]
COSTS = "1,1.1,1.15,1.2,1.3,1.4,1.45,1.5,1.6"  # SmolLM2 on two cores, packed fp16; docs/results.md


@dataclass
class Tally:
    """Sums over some replayed texts; `claims` are (source, slot) -> [sum of estimates, kept, decided]."""

    tokens: int = 0
    steps: int = 0
    cost: float = 0.0
    claims: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0, 0.0]))

    def __str__(self) -> str:
        return f"{self.tokens / self.steps:.2f} ({self.tokens / self.cost:.2f}x)" if self.steps else "-"

    def add(self, guess: LookupGuess, kept: int, committed: int, costs: list[float]) -> None:
        self.tokens += committed
        self.steps += 1
        self.cost += costs[min(len(guess.ids), len(costs) - 1)]
        for slot in range(min(kept + 1, committed, len(guess.ids))):
            claim = self.claims[guess.source, slot]
            claim[0] += guess.estimates[slot]
            claim[1] += slot < kept
            claim[2] += 1


def only_table(table: CorpusTable) -> Guess:
    def guess(proposer: LookupProposer, request: Request, length: int) -> LookupGuess:
        ids, chances, order = table_chain(table, request.tokens(max(0, request.num_tokens - table.longest)), length)
        return LookupGuess(tuple(ids), "table", order, tuple(chances), kinds=("table",) * len(ids))

    return guess


def replay(
    corpus: Corpus, described: Described, table: CorpusTable | None, guess: Guess, drafts: int, costs: list[float]
) -> dict[tuple[float, str], Tally]:
    """One engine's worth of requests, one after the other; a tally per temperature and kind of text."""
    proposer, tallies = LookupProposer(table), defaultdict(Tally)
    for i in range(len(corpus)):
        tokens, prompt = corpus.sequence(i).tolist(), corpus.prompt_lens[i]
        params = SamplingParams(temperature=corpus.temperatures[i])
        text = TextStream(described.tokenizer)
        request = Request(i, tokens[:prompt], params, len(tokens), frozenset(), text, key=0, coupled=False)
        request.output_ids.append(tokens[prompt])  # it comes with the prompt's pass
        tally = tallies[corpus.temperatures[i], corpus.kinds[i]]
        while request.remaining:
            made = guess(proposer, request, min(drafts, request.remaining - 1))
            begin, kept = request.num_tokens, 0
            while kept < len(made.ids) and made.ids[kept] == tokens[begin + kept]:
                kept += 1
            committed = tokens[begin : begin + kept + 1]
            request.output_ids += committed
            proposer.observe_outcome(made, committed)
            tally.add(made, kept, len(committed), costs)
        proposer.release(request)
    return dict(tallies)


def total(tallies: dict[tuple[float, str], Tally], temperature: float | None = None) -> Tally:
    result = Tally()
    for (at, _), tally in tallies.items():
        if temperature is None or at == temperature:
            result.tokens += tally.tokens
            result.steps += tally.steps
            result.cost += tally.cost
            for key, sums in tally.claims.items():
                result.claims[key] = [a + b for a, b in zip(result.claims[key], sums, strict=True)]
    return result


def show(found: dict[str, dict[tuple[float, str], Tally]]) -> None:
    first = next(iter(found.values()))
    print(f"| temperature | text | {' | '.join(found)} |\n| --- | --- |{' --- |' * len(found)}")
    for temperature in sorted({at for at, _ in first}):
        for kind in sorted({kind for at, kind in first if at == temperature}):
            cells = [str(tallies[temperature, kind]) for tallies in found.values()]
            print(f"| {temperature:g} | {kind} | {' | '.join(cells)} |")
        cells = [str(total(tallies, temperature)) for tallies in found.values()]
        print(f"| {temperature:g} | all | {' | '.join(cells)} |")


def show_estimates(tally: Tally) -> None:
    print("\n| source | slot | decided | estimated | kept |\n| --- | --- | --- | --- | --- |")
    for (source, slot), (estimated, kept, decided) in sorted(tally.claims.items()):
        print(f"| {source} | {slot + 1} | {decided:.0f} | {estimated / decided:.1%} | {kept / decided:.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="packed token files")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--held-out", type=float, default=0.3, help="share of the prompts measured on")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--min-count", type=int, default=2)
    parser.add_argument("--max-mb", type=float, default=8.0)
    parser.add_argument("--no-loops", action="store_true", help="also cut looping tails of the texts measured on")
    parser.add_argument("--costs", default=COSTS, help="of passes of 1, 2, ... tokens")
    args = parser.parse_args()
    costs = [float(cost) for cost in args.costs.split(",")]
    described = Described.load(args.target)
    training, held_out = hold_out(
        read_corpus(args.data, described.spec.vocab_size, described.spec.context, described.fingerprint), args.held_out
    )
    settings = TableSettings(min_count=args.min_count, max_mb=args.max_mb)
    table = count_table(cut_loops(training), settings, described.fingerprint)
    held_out = cut_loops(held_out) if args.no_loops else held_out
    size = sum(len(rows) * rows.row_bytes for rows in table.orders.values())
    print(f"Table: {len(table)} contexts, {size / 1e6:.2f} MB, from {table.counted['response_tokens']} tokens.")
    print(f"Measured on {held_out.response_tokens} tokens of other prompts, up to {args.drafts} drafts.")
    print("Cells: acceptance length (speed-up).\n", flush=True)
    found = {
        name: replay(held_out, described, uses, guess, args.drafts, costs)
        for name, uses, guess in (
            ("own text", None, LookupProposer.guess),
            ("table", None, only_table(table)),
            ("own text, then table", table, LookupProposer.guess),
        )
    }
    show(found)
    show_estimates(total(found["own text, then table"]))


if __name__ == "__main__":
    main()
