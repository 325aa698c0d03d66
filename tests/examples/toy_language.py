"""A Qwen3-style model that learned a toy language: answer a letter with the alphabet from there on."""

import json
from pathlib import Path

import torch

from tests.toy_models import BOS_ID, EOS_ID, write_model

ALPHABET = "abcdefghijklmnopqrstuvwxyz"
STEPS, BATCH, LENGTH = 220, 12, 72


def prompt(letter: str, length: int) -> str:
    return f"{length} letters from {letter}"


def answer(letter: str, length: int) -> str:
    first = ALPHABET.index(letter)
    return " ".join(ALPHABET[(first + i) % 26] for i in range(length))


def conversation(letter: str, length: int) -> list[int]:
    """Token ids as the chat template of `tests.toy_models` writes them."""
    user = list(f"user\n{prompt(letter, length)}".encode())
    return [BOS_ID, *user, EOS_ID, 10, BOS_ID, *b"assistant\n", *answer(letter, length).encode(), EOS_ID]


def train_model(folder: Path) -> Path:
    """Random weights, then a few hundred steps of language modelling through transformers."""
    import transformers

    write_model(folder, "qwen3", scale=0.05)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    make = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (1 - step / STEPS)
        letters = torch.randint(0, 26, (BATCH,), generator=make).tolist()
        lengths = torch.randint(8, 20, (BATCH,), generator=make).tolist()
        texts = [conversation(ALPHABET[i], n) for i, n in zip(letters, lengths, strict=True)]
        ids = torch.tensor([(t + [EOS_ID] * LENGTH)[:LENGTH] for t in texts])
        labels = torch.tensor([(t + [-100] * LENGTH)[:LENGTH] for t in texts])
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    from safetensors.torch import save_file

    save_file({name: t.detach().contiguous() for name, t in model.state_dict().items()}, folder / "model.safetensors")
    return folder


def write_prompts(path: Path) -> Path:
    rows = [{"cat": "chat", "prompt": prompt(letter, n)} for letter in ALPHABET for n in (12, 18)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
