"""The journal: whatever a kill leaves is taken up, and nothing of another run is."""

import resource

import pytest

from dspark.data.journal import Journal, journal_path
from dspark.errors import DataError
from tests.sentences import assert_one_sentence

SETTINGS = {"seed": 1, "kinds": ["a", "b"], "target": {"weights": "w"}}
ENTRIES = {3: [1, 2], 0: "líne\n", 7: None}


def write(path, entries, settings=SETTINGS):
    with Journal(path, settings) as journal:
        for index, value in entries.items():
            journal.add(index, value)


def refused(path, settings, *names):
    with pytest.raises(DataError) as error:
        Journal(path, settings)
    assert_one_sentence(error.value, names)


def test_a_cut_at_any_byte_leaves_whole_items_and_can_go_on(tmp_path):
    path = tmp_path / "j"
    write(path, ENTRIES)
    content = path.read_bytes()
    for cut in range(len(content) + 1):
        path.write_bytes(content[:cut])
        with Journal(path, SETTINGS) as journal:
            found = dict(journal.entries)
            assert list(found.items()) == list(ENTRIES.items())[: len(found)]
            assert len(found) == max(0, content[:cut].count(b"\n") - 1)
            for index in list(ENTRIES)[len(found) :]:
                journal.add(index, ENTRIES[index])
        assert path.read_bytes() == content


def test_garbage_after_a_power_cut_is_dropped(tmp_path):
    path = tmp_path / "j"
    write(path, ENTRIES)
    content = path.read_bytes()
    path.write_bytes(content + b"\0" * 300 + b'\n{"i":9,"v":9}\n')
    with Journal(path, SETTINGS) as journal:
        assert journal.entries == ENTRIES
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"seed": 2}, ["seed", "1", "2"]),
        ({"kinds": ["a"]}, ["kinds", '["a", "b"]']),
        ({"target": {"weights": "x"}}, ["target", '"w"', '"x"']),
        ({"more": True}, ["more", "true"]),
    ],
)
def test_another_run_is_refused_and_its_items_stay(tmp_path, changes, names):
    path = tmp_path / "j"
    write(path, ENTRIES)
    before = path.read_bytes()
    refused(path, SETTINGS | changes, str(path), "--out", *names)
    assert path.read_bytes() == before


def test_two_runs_at_once(tmp_path):
    path = tmp_path / "j"
    with Journal(path, SETTINGS):
        refused(path, SETTINGS, str(path), "in use")
    write(path, ENTRIES)


def test_a_full_disk_is_one_sentence_and_what_is_there_stays(tmp_path):
    path = tmp_path / "j"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(path, SETTINGS) as journal:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, limits[1]))
            with pytest.raises(DataError) as error:
                for index in range(5):
                    journal.add(index, "x" * 1_000_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_one_sentence(error.value, [str(path), "same command"])
    assert path.stat().st_size == 4_000_000  # the last line is torn
    with Journal(path, SETTINGS) as journal:
        assert sorted(journal.entries) == [0, 1, 2]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    refused(journal_path(tmp_path / "file" / "out.npz"), SETTINGS, "cannot be written")
