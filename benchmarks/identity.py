"""Is the text with drafts that of plain decoding? 60 prompts on SmolLM2, exact and fast mode, greedy and seeded.

    python benchmarks/identity.py [--prompts 60] [--tokens 128] [--batch 30] [--transformers 6] > identity.md

Exact mode must show no difference at all. In fast mode each difference is listed with the gap between the two tokens'
scores and the noise of the kernels; one that is not a tie makes the script exit 1.
"""

import argparse
import sys
import time

import torch

from dspark.config import Draft, EngineConfig, SamplingParams
from dspark.drafter import DrafterConfig, random_drafter
from dspark.engine import Engine
from dspark.engine.dspark_proposer import DsparkProposer
from dspark.engine.lookup import LookupProposer
from dspark.engine.model_proposer import ModelProposer
from dspark.engine.proposer import NoneProposer, StatelessProposer, point_masses
from dspark.measure import WORKLOADS, differences, kernel_noise
from dspark.target import load_target

MODES = {
    "greedy": lambda tokens: SamplingParams(temperature=0, max_tokens=tokens),
    "seeded, T=1": lambda tokens: SamplingParams(temperature=1.0, seed=0, max_tokens=tokens),
}


class PartlyRight(StatelessProposer):
    """Drafts the known answer, wrong at two positions in five."""

    name = "60 % right"

    def __init__(self, prompts, answers):
        self._answers = dict(zip(map(tuple, prompts), answers, strict=True))

    def propose(self, rows, lens, streams) -> Draft:
        guesses = []
        for row, length in zip(rows, lens, strict=True):
            answer, begin = self._answers[tuple(row.request.prompt_ids)], len(row.request.output_ids)
            guesses.append(
                [t if i * 7 % 5 > 1 else t // 2 + 3 for i, t in enumerate(answer[begin : begin + length], begin)]
            )
        return point_masses(guesses, self.name)


def hopeless(target):
    config = DrafterConfig(
        hidden_size=target.spec.hidden_size, num_layers=1, num_heads=9, num_kv_heads=9, head_dim=64, ffn_size=1536,
        vocab_size=target.spec.vocab_size, target_layer_ids=(8, 18, 28), mask_token_id=5, block_size=8, markov_rank=64,
        draft_vocab_size=8192, context=target.spec.context, target=target.fingerprint,
    )  # fmt: skip
    return DsparkProposer(random_drafter(config, target.decoder, seed=0))


def decode(target, proposer, prompts, params, batch):
    engine = Engine(target, proposer, EngineConfig(kv_gb=1.0, max_batch=batch))
    began = time.perf_counter()
    outputs = engine.generate(prompts, params)
    seconds = time.perf_counter() - began
    steps, committed = sum(o.stats.steps for o in outputs), sum(o.stats.committed for o in outputs)
    print(f"  {proposer.name}, batch {batch}: {seconds:.0f} s, AL {committed / steps:.2f}", file=sys.stderr, flush=True)
    return [o.token_ids for o in outputs]


def report(setting, target, prompts, plain, ours, params):
    found = differences(target, prompts, plain, ours, params)
    faults = [d for d in found if not d.is_tie]
    equal = len(prompts) - len(found)
    tokens = sum(map(len, plain))
    print(
        f"| {setting} | {equal} of {len(prompts)} answers equal ({tokens} tokens) | {len(found) - len(faults)} "
        f"| {len(faults)} |",
        flush=True,
    )
    return found


def transformers_greedy(target, prompts, tokens):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=2)
        answers.append(tuple(out[0, len(prompt) :].tolist()))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=30)
    parser.add_argument("--numbers", choices=["exact", "fast", "both"], default="both")
    parser.add_argument("--transformers", type=int, default=6, help="prompts to compare with transformers, 0 for none")
    args = parser.parse_args()
    kinds = zip(*(WORKLOADS[kind] for kind in ("code", "math", "chat")), strict=True)
    questions = [question for three in kinds for question in three][: args.prompts]
    print("| setting | against plain decoding | ties | faults |\n| --- | --- | --- | --- |", flush=True)
    found = []
    for exact in {"exact": [True], "fast": [False], "both": [True, False]}[args.numbers]:
        target = load_target("smollm2", torch.device("cpu"), exact=exact)
        name = "exact" if exact else "fast"
        tokenizer = target.tokenizer
        prompts = [
            tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": q}]), add_special_tokens=False)
            for q in questions
        ]
        for mode, make_params in MODES.items():
            params = make_params(args.tokens)
            print(f"{name}, {mode}", file=sys.stderr)
            plain = decode(target, NoneProposer(), prompts, params, args.batch)
            proposers = [LookupProposer(), PartlyRight(prompts, plain)] + (
                [hopeless(target), ModelProposer(target, target)] if exact else []
            )
            for proposer in proposers:
                ours = decode(target, proposer, prompts, params, args.batch)
                found += report(f"{name}, {mode}, {proposer.name}", target, prompts, plain, ours, params)
            if not exact and params.greedy and args.transformers:
                theirs = transformers_greedy(target, prompts[: args.transformers], args.tokens)
                setting = f"fast, greedy, transformers' generate in fp32, {args.transformers} prompts"
                found += report(
                    setting, target, prompts[: args.transformers], plain[: args.transformers], theirs, params
                )
    for d in found:
        kind = "tie" if d.is_tie else "FAULT"
        print(f"\n{kind}: prompt {d.prompt} at token {d.position}: gap {d.gap:.2g}, noise {d.noise:.2g}")
    print(f"\nKernel noise in {name} mode: {kernel_noise(target, prompts[0]):.2g} (logits, first prompt)")
    sys.exit(any(not d.is_tie for d in found))


if __name__ == "__main__":
    main()
