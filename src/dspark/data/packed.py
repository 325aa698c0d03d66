"""Packed token files: many sequences (prompt, then the target's response) end to end in one `.npz`.

Arrays: `ids` (all tokens), `offsets` (sequence i is ids[offsets[i]:offsets[i+1]]), `prompt_len` (tokens before the
response), `temp` (temperature the response was sampled at), `cat` (kind of text), and `provenance` (JSON: format
version, fingerprint of the target, sampling settings). Files without `provenance` are read, with a note that says so.
"""

import hashlib
import json
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from dspark.artifacts import Fingerprint
from dspark.artifacts.files import replacing
from dspark.errors import DataError, DrafterError

FORMAT = 1
_FIELDS = ("ids", "offsets", "prompt_len", "temp", "cat")


@dataclass(frozen=True)
class Provenance:
    """Where a file's text comes from: the target that wrote it and how it was sampled."""

    target: Fingerprint
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Corpus:
    """Sequences of one or several files. Token ids are int64; sequence i's response begins at `prompt_lens[i]`.

    `notes` are sentences for the caller to log.
    """

    ids: Int[Tensor, " N"]
    offsets: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    temperatures: tuple[float, ...]
    kinds: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt_lens)

    def sequence(self, index: int) -> Int[Tensor, " T"]:
        """Prompt and response."""
        return self.ids[self.offsets[index] : self.offsets[index + 1]]

    def response(self, index: int) -> Int[Tensor, " R"]:
        return self.sequence(index)[self.prompt_lens[index] :]

    def length(self, index: int) -> int:
        return self.offsets[index + 1] - self.offsets[index]

    @property
    def response_tokens(self) -> int:
        return self.ids.shape[0] - sum(self.prompt_lens)

    def shortened(self, lengths: Sequence[int]) -> "Corpus":
        """Each sequence cut to its first `lengths[i]` tokens; those left without a response are dropped."""
        kept = [i for i, n in enumerate(lengths) if n > self.prompt_lens[i]]
        parts = [self.sequence(i)[: lengths[i]] for i in kept]
        return Corpus(
            torch.cat(parts) if parts else self.ids[:0],
            _offsets([p.shape[0] for p in parts]),
            tuple(self.prompt_lens[i] for i in kept),
            tuple(self.temperatures[i] for i in kept),
            tuple(self.kinds[i] for i in kept),
            self.notes,
        )

    def subset(self, indices: Collection[int]) -> "Corpus":
        """Some sequences, in their order here."""
        wanted = set(indices)
        return self.shortened([self.length(i) if i in wanted else 0 for i in range(len(self))])

    def digest(self) -> str:
        """Short hash of tokens and structure: the same data, the same digest, whatever files it came from."""
        sha = hashlib.sha256(self.ids.numpy().tobytes())
        sha.update(np.array([self.offsets[1:], self.prompt_lens], np.int64).tobytes())
        return sha.hexdigest()[:16]

    def text_digest(self, index: int) -> str:
        """Hash of one text: its tokens, and where its response begins."""
        sha = hashlib.sha256(self.sequence(index).numpy().tobytes())
        sha.update(self.prompt_lens[index].to_bytes(8, "little"))
        return sha.hexdigest()[:32]

    def with_notes(self, *notes: str) -> "Corpus":
        return Corpus(self.ids, self.offsets, self.prompt_lens, self.temperatures, self.kinds, (*self.notes, *notes))


def _offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(n) for n in np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))


def read_corpus(paths: Sequence[Path], vocab_size: int, context: int, target: Fingerprint | None = None) -> Corpus:
    """Several packed files, one after the other.

    Sequences without response tokens are left out, and a note counts them.

    Raises:
        DataError: as `read_packed`, or no file is given.
    """
    if not paths:
        raise DataError("No data file is given; name at least one packed token file.")
    parts = [read_packed(path, vocab_size, context, target) for path in paths]
    return Corpus(
        torch.cat([p.ids for p in parts]),
        _offsets([p.length(i) for p in parts for i in range(len(p))]),
        tuple(n for p in parts for n in p.prompt_lens),
        tuple(t for p in parts for t in p.temperatures),
        tuple(k for p in parts for k in p.kinds),
        tuple(note for p in parts for note in p.notes),
    )


def read_packed(path: Path, vocab_size: int, context: int, target: Fingerprint | None = None) -> Corpus:
    """One packed file, checked against a target of `vocab_size` tokens and `context` positions.

    Raises:
        DataError: missing, damaged, another format; ids outside the vocabulary; a sequence over the context; another
            tokenizer than `target`'s; no response tokens at all.
    """
    arrays = _load(path)
    notes = _check_provenance(path, arrays.get("provenance"), target)
    lengths = _check_structure(path, arrays)
    ids = arrays["ids"].astype(np.int64)
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        bad = ids.min() if ids.min() < 0 else ids.max()
        raise DataError(
            f"{path} holds token id {bad} and the target has ids 0 to {vocab_size - 1}; use text this target generated."
        )
    if lengths.size and lengths.max() > context:
        raise DataError(
            f"{path} has a sequence of {lengths.max()} tokens (number {lengths.argmax()}) and the target's context is "
            f"{context}; make the file again with shorter responses."
        )
    prompt_lens = arrays["prompt_len"].astype(np.int64)
    empty = int((prompt_lens >= lengths).sum())
    if empty == len(lengths):
        raise DataError(f"{path} has no response tokens; a drafter learns from responses, so generate them first.")
    corpus = Corpus(
        torch.from_numpy(ids),
        tuple(arrays["offsets"].tolist()),
        tuple(prompt_lens.tolist()),
        tuple(arrays["temp"].astype(np.float64).round(6).tolist()),
        tuple(map(str, arrays["cat"])),
    )
    if empty:
        notes.append(f"{path} has {empty} sequences without response tokens, which are left out.")
        corpus = corpus.shortened(lengths.tolist())
    return corpus.with_notes(*notes)


def read_provenance(path: Path) -> Provenance | None:
    """What a packed file says about its origin; None if it says nothing.

    Raises:
        DataError: as `read_packed`, of the parts that are read here.
    """
    stored = _load(path).get("provenance")
    if stored is None:
        return None
    made_by, values = _parse_provenance(path, stored)
    return Provenance(made_by, values.get("sampling", {}))


def _load(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give a packed token file.") from None
    except (
        OSError,
        ValueError,
        TypeError,
        EOFError,
        KeyError,
        AttributeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        # numpy's own words advise to load pickles, which is not what a user should do
        reason = getattr(error, "strerror", None) or "cut short, or of another kind"
        raise DataError(f"{path} is not a readable packed token file ({reason}); make or copy it again.") from None


def _check_structure(path: Path, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Lengths of the sequences."""
    missing = [name for name in _FIELDS if name not in arrays]
    if missing:
        raise DataError(f"{path} has no array {', '.join(missing)}; a packed token file has {', '.join(_FIELDS)}.")

    def damaged(what: str) -> DataError:
        return DataError(f"{path} is damaged ({what}); make or copy it again.")

    whole = ("ids", "offsets", "prompt_len")
    for name in _FIELDS:
        if arrays[name].ndim != 1:
            raise damaged(f"{name} has {arrays[name].ndim} dimensions instead of 1")
        if name in whole and arrays[name].dtype.kind not in "iu":
            raise damaged(f"{name} holds {arrays[name].dtype} instead of whole numbers")
    if arrays["temp"].dtype.kind not in "fiu":
        raise damaged(f"temp holds {arrays['temp'].dtype} instead of numbers")
    offsets = arrays["offsets"].astype(np.int64)
    if not offsets.size or offsets[0] != 0 or offsets[-1] != arrays["ids"].size:
        raise damaged(f"offsets do not span the {arrays['ids'].size} ids")
    lengths = np.diff(offsets)
    if lengths.size and lengths.min() < 1:
        raise damaged("offsets do not ascend")
    for name in ("prompt_len", "temp", "cat"):
        if arrays[name].size != lengths.size:
            raise damaged(f"{name} has {arrays[name].size} entries for {lengths.size} sequences")
    prompt_lens = arrays["prompt_len"].astype(np.int64)
    if lengths.size and not ((prompt_lens >= 1) & (prompt_lens <= lengths)).all():
        raise damaged("a prompt_len lies outside its sequence")
    if not np.isfinite(arrays["temp"]).all():
        raise damaged("temp holds values that are not numbers")
    return lengths


def _check_provenance(path: Path, stored: np.ndarray | None, target: Fingerprint | None) -> list[str]:
    """Notes about where the file's text comes from."""
    if stored is None:
        return [f"{path} does not say which target wrote it; make sure it was this one."]
    made_by, _ = _parse_provenance(path, stored)
    if target is None:
        return []
    if made_by.tokenizer != target.tokenizer:
        raise DataError(
            f"{path} was made with the tokenizer of {made_by.name or 'another target'} ({made_by.tokenizer}) and this "
            f"target has another ({target.tokenizer}); generate data with this target."
        )
    if made_by.weights != target.weights:
        return [
            f"{path} was written by other weights ({made_by.weights}) than this target's ({target.weights}); a drafter "
            "learns best from its own target's text."
        ]
    return []


def _parse_provenance(path: Path, stored: np.ndarray) -> tuple[Fingerprint, dict[str, Any]]:
    try:
        values = json.loads(str(stored))
        version = values["format"]
        made_by = Fingerprint.from_dict(values["target"])
    except (ValueError, KeyError, TypeError, DrafterError):
        raise DataError(f"{path} is damaged (its provenance cannot be read); make or copy it again.") from None
    if version != FORMAT:
        raise DataError(
            f"{path} has format {version!r} and this version of dspark reads {FORMAT}; make the file again or install "
            "the version that wrote it."
        )
    return made_by, values


def write_packed(path: Path, corpus: Corpus, provenance: Provenance) -> None:
    """Write `corpus` to `path`: the whole file appears at once or not at all.

    Raises:
        DataError: the file cannot be written.
    """
    about = {"format": FORMAT, "target": provenance.target.to_dict(), "sampling": dict(provenance.sampling)}
    largest = int(corpus.ids.max()) if corpus.ids.numel() else 0
    arrays = {
        "ids": corpus.ids.numpy().astype(np.uint16 if largest < 2**16 else np.uint32),
        "offsets": np.array(corpus.offsets, np.int64),
        "prompt_len": np.array(corpus.prompt_lens, np.int32),
        "temp": np.array(corpus.temperatures, np.float32),
        "cat": np.array(corpus.kinds, np.str_),
        "provenance": np.array(json.dumps(about)),
    }
    try:
        with replacing(path) as part, part.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(f"{path} cannot be written ({reason}); free space or permissions there.") from None
