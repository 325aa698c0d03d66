"""Packed token files: round trips, several files as one, and one sentence for everything wrong with them."""

import json
import os
import re

import numpy as np
import pytest
import torch

from dspark.artifacts import Fingerprint
from dspark.data import Corpus, Provenance, cut_loops, hold_out, read_corpus, read_packed, write_packed
from dspark.errors import DataError
from tests.sentences import assert_one_sentence

VOCAB, CONTEXT = 50, 20
TARGET = Fingerprint("w1", "t1", "c1", "toy")


def arrays(**changes):
    """Two sequences: [1 2 | 3 4 5] and [6 | 7]."""
    values = {
        "ids": np.array([1, 2, 3, 4, 5, 6, 7], np.uint16),
        "offsets": np.array([0, 5, 7], np.int64),
        "prompt_len": np.array([2, 1], np.int32),
        "temp": np.array([0.0, 0.7], np.float32),
        "cat": np.array(["code", "chat"]),
    }
    return {name: value for name, value in (values | changes).items() if value is not None}


def packed(path, **changes):
    np.savez_compressed(path, **arrays(**changes))
    return path


def provenance(target=TARGET, **changes):
    return np.array(json.dumps({"format": 1, "target": target.to_dict(), "sampling": {"top_p": 0.95}} | changes))


def test_a_file_without_provenance_is_read_and_says_so(tmp_path):
    corpus = read_packed(packed(tmp_path / "a.npz"), VOCAB, CONTEXT, TARGET)
    assert [corpus.sequence(i).tolist() for i in range(2)] == [[1, 2, 3, 4, 5], [6, 7]]
    assert [corpus.response(i).tolist() for i in range(2)] == [[3, 4, 5], [7]]
    assert corpus.prompt_lens == (2, 1) and corpus.temperatures == (0.0, 0.7) and corpus.kinds == ("code", "chat")
    assert corpus.response_tokens == 4
    (note,) = corpus.notes
    assert_one_sentence(note, ["a.npz", "does not say"])


def test_files_are_read_one_after_the_other(tmp_path):
    one = packed(tmp_path / "a.npz", provenance=provenance())
    two = packed(tmp_path / "b.npz", ids=np.arange(10, 17).astype(np.uint16), provenance=provenance())
    corpus = read_corpus([one, two], VOCAB, CONTEXT, TARGET)
    assert [corpus.sequence(i).tolist() for i in range(4)] == [[1, 2, 3, 4, 5], [6, 7], [10, 11, 12, 13, 14], [15, 16]]
    assert corpus.notes == () and corpus.prompt_lens == (2, 1, 2, 1)


def test_what_is_written_is_read(tmp_path):
    first = read_packed(packed(tmp_path / "a.npz"), VOCAB, CONTEXT)
    path = tmp_path / "new" / "b.npz"
    write_packed(path, first, Provenance(TARGET, {"top_p": 0.95}))
    again = read_packed(path, VOCAB, CONTEXT, TARGET)
    assert again.ids.tolist() == first.ids.tolist() and again.notes == ()
    assert again.digest() == first.digest()
    stored = json.loads(str(np.load(path)["provenance"]))
    assert stored["target"]["weights"] == "w1" and stored["sampling"] == {"top_p": 0.95}
    assert os.listdir(path.parent) == ["b.npz"]


def test_large_ids_survive_writing(tmp_path):
    corpus = Corpus(torch.tensor([3, 70000, 5]), (0, 3), (1,), (0.0,), ("chat",))
    write_packed(tmp_path / "a.npz", corpus, Provenance(TARGET))
    assert read_packed(tmp_path / "a.npz", 80000, CONTEXT).ids.tolist() == [3, 70000, 5]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    corpus = read_packed(packed(tmp_path / "a.npz"), VOCAB, CONTEXT)
    before = (tmp_path / "a.npz").read_bytes()

    def full(file, **values):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(DataError) as error:
        write_packed(tmp_path / "a.npz", corpus, Provenance(TARGET))
    assert_one_sentence(error.value, ["a.npz", "No space left"])
    assert (tmp_path / "a.npz").read_bytes() == before and os.listdir(tmp_path) == ["a.npz"]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"ids": np.array([1, 2, 3, 4, 50, 6, 7], np.uint16)}, ["token id 50", "0 to 49"]),
        ({"ids": np.array([1, 2, -3, 4, 5, 6, 7], np.int64)}, ["token id -3"]),
        ({"prompt_len": np.array([5, 2])}, ["no response tokens"]),
        ({"prompt_len": np.array([6, 1])}, ["prompt_len"]),
        ({"prompt_len": np.array([0, 1])}, ["prompt_len"]),
        ({"prompt_len": np.array([2])}, ["prompt_len has 1 entries for 2"]),
        ({"offsets": np.array([0, 5, 8])}, ["offsets"]),
        ({"offsets": np.array([0, 7, 7])}, ["offsets do not ascend"]),
        ({"offsets": np.array([0.0, 5.0, 7.0])}, ["offsets", "float64"]),
        ({"temp": np.array([0.0, np.nan])}, ["temp"]),
        ({"ids": np.arange(8).reshape(2, 4)}, ["ids has 2 dimensions"]),
        ({"cat": None}, ["no array cat"]),
        ({"provenance": np.array("{")}, ["provenance"]),
        ({"provenance": provenance(format=7)}, ["format 7"]),
        ({"provenance": provenance(Fingerprint("w1", "t2", "c1", "other"))}, ["tokenizer of other", "t2", "t1"]),
    ],
)
def test_bad_content_is_one_sentence(tmp_path, changes, names):
    path = packed(tmp_path / "a.npz", **changes)
    with pytest.raises(DataError) as error:
        read_packed(path, VOCAB, CONTEXT, TARGET)
    assert_one_sentence(error.value, ["a.npz", *names])


def test_a_sequence_over_the_context(tmp_path):
    path = packed(tmp_path / "a.npz")
    assert len(read_packed(path, VOCAB, 5)) == 2
    with pytest.raises(DataError) as error:
        read_packed(path, VOCAB, 4)
    assert_one_sentence(error.value, ["a.npz", "5 tokens", "context is 4"])


def test_files_that_are_no_packed_files(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").write_bytes(b"")
    whole = packed(tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    np.save(tmp_path / "one.npy", np.arange(3))
    np.savez(tmp_path / "objects.npz", **arrays(cat=np.array(["a", None], dtype=object)))
    for name in ("text.npz", "empty.npz", "cut.npz", "one.npy", "objects.npz"):
        with pytest.raises(DataError) as error:
            read_packed(tmp_path / name, VOCAB, CONTEXT)
        assert_one_sentence(error.value, [name, "not a readable packed token file"])
    with pytest.raises(DataError) as error:
        read_packed(tmp_path / "absent.npz", VOCAB, CONTEXT)
    assert_one_sentence(error.value, ["absent.npz", "does not exist"])
    with pytest.raises(DataError):
        read_corpus([], VOCAB, CONTEXT)


def test_other_weights_of_the_same_tokenizer_are_a_note(tmp_path):
    path = packed(tmp_path / "a.npz", provenance=provenance(Fingerprint("w2", "t1", "c1", "toy")))
    (note,) = read_packed(path, VOCAB, CONTEXT, TARGET).notes
    assert_one_sentence(note, ["w2", "w1"])


def test_sequences_without_response_are_left_out_and_counted(tmp_path):
    corpus = read_packed(
        packed(tmp_path / "a.npz", prompt_len=np.array([2, 2]), provenance=provenance()), VOCAB, CONTEXT
    )
    assert [corpus.sequence(i).tolist() for i in range(len(corpus))] == [[1, 2, 3, 4, 5]]
    assert re.search("1 sequences without response", corpus.notes[0])


def make_corpus(sequences, prompt_lens):
    offsets = tuple(np.concatenate(([0], np.cumsum([len(s) for s in sequences]))).tolist())
    count = len(sequences)
    return Corpus(
        torch.tensor([t for s in sequences for t in s]), offsets, tuple(prompt_lens), (0.0,) * count, ("chat",) * count
    )


def test_loops_are_cut_in_responses_only():
    looping, calm = [1, 2] * 4, [1, 2, 3, 4, 5, 6, 7, 8]
    corpus = make_corpus([looping + calm, calm + looping], [8, 8])
    shorter = cut_loops(corpus, ngram=2, repeats=2)
    # 1 2 . 1 2 . 1 | 2 would complete "1 2" for the third time
    assert shorter.sequence(0).tolist() == looping + calm
    assert shorter.sequence(1).tolist() == calm + [1, 2, 1, 2, 1]
    assert_one_sentence(shorter.notes[0], ["1 of 2 responses", "3 of 16"])
    assert cut_loops(corpus, ngram=2, repeats=9) is corpus


def test_held_out_prompts_are_never_trained_on():
    sequences = [[i % 20, 3, 7 + j] for i in range(40) for j in range(2)]
    corpus = make_corpus(sequences, [2] * len(sequences))
    training, held = hold_out(corpus, 0.3)
    prompts = [{tuple(part.sequence(i)[:2].tolist()) for i in range(len(part))} for part in (training, held)]
    assert prompts[0] and prompts[1] and not prompts[0] & prompts[1]
    assert len(training) + len(held) == len(corpus)
    assert len(hold_out(corpus, 0.0)[1]) == 0
    # Membership does not depend on what else is in the data.
    fewer = make_corpus(sequences[::2], [2] * len(sequences[::2]))
    again = {
        tuple(s)
        for s in (hold_out(fewer, 0.3)[1].sequence(i)[:2].tolist() for i in range(len(hold_out(fewer, 0.3)[1])))
    }
    assert again == prompts[1]
