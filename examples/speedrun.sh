#!/usr/bin/env bash
# From a target to a measured speed-up, every step one command: the executable table of contents.
#
#   examples/speedrun.sh                        a real drafter, many hours on a CPU; killed, it goes on where it stood
#   examples/speedrun.sh --tiny                 every step once, in two minutes, with a drafter that has learned nothing
#   examples/speedrun.sh --target ./my-model --out runs/mine
set -euo pipefail

target=smollm2 out=runs/speedrun tiny=
while (($#)); do
  case $1 in
    --tiny) tiny=yes ;;
    --target) target=${2:?--target needs a model}; shift ;;
    --out) out=${2:?--out needs a folder}; shift ;;
    *) sed -n '2,6s/^# \{0,1\}//p' "$0"; [ "$1" = --help ] && exit 0 || exit 2 ;;
  esac
  shift
done

if [ -z "$tiny" ]; then
  synth=(--count 20000)
  fresh=(--count 240)
  respond=(--max-tokens 512)
  train=(--minutes 600)
  calibrate=(--blocks 5000)
  acceptance=(--temperatures 0,1)
  answer=(--max-tokens 256)
else
  synth=(--count 6 --max-tokens 48 --kinds chat,code)
  fresh=(--count 4 --max-tokens 48 --kinds chat,code)
  respond=(--max-tokens 48 --temperatures 0,1)
  train=(--steps 30 --block 4 --draft-vocab 2048 --batch-blocks 16 --cache-gb 0.1
    --held-out 0.3 --validate-blocks 10 --sampled-blocks 4)
  calibrate=(--blocks 10 --max-tokens 32 --temperatures 0,1 --rules rejection)
  acceptance=(--max-tokens 32 --temperatures 0 --limit 2)
  answer=(--max-tokens 32)
fi

step() { printf '\n== %s\n' "$*" >&2; "$@"; }
mkdir -p "$out"
drafter=$out/drafter

# 1. Text the target itself wrote: prompts, answers, a look at them.
step dspark data synth --target "$target" --out "$out/prompts.jsonl" "${synth[@]}"
step dspark data respond --target "$target" --prompts "$out/prompts.jsonl" --out "$out/data.npz" "${respond[@]}"
step dspark data inspect --target "$target" "$out/data.npz" --show 1

# 2. What training will take, then training.
step dspark estimate --target "$target" --data "$out/data.npz" "${train[@]}"
step dspark train --target "$target" --data "$out/data.npz" --out "$drafter" --resume "${train[@]}"

# 3. The table of what usually follows; beside the drafter it is found by itself.
step dspark data table --target "$target" --data "$out/data.npz" --out "$drafter/table.dspt"

# 4. Prompts nobody trained on: make the confidences honest, count what is accepted.
step dspark data synth --target "$target" --out "$out/fresh.jsonl" --seed 1 "${fresh[@]}"
step dspark calibrate --target "$target" --drafter "$drafter" --prompts "$out/fresh.jsonl" "${calibrate[@]}"
step dspark acceptance --target "$target" --drafter "$drafter" --prompts "$out/fresh.jsonl" "${acceptance[@]}"

# 5. What passes cost on this machine, then an answer with and without drafts: equal, and how much faster.
step dspark profile --target "$target" --drafter "$drafter"
step dspark generate --model "$target" --drafter "$drafter" --stats --compare "${answer[@]}" \
  "Write a Python function that checks whether a number is prime."
