"""A store reads back what was written, and an incomplete or damaged store raises an error."""

import contextlib
import json
import os
import pickle
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unheard.corpus.store import (
    ShardWriter,
    StoreWriter,
    TokenStore,
    partial_path,
    token_dtype,
    write_digests,
    write_shard,
    write_store,
)
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import CorpusCorrupt, CorpusError, CorpusMissing

WORDS = Vocabulary.of("abcdefgh")


def arrays(*users):
    return [np.array(u, dtype=np.int64) for u in users]


@pytest.fixture
def small(tmp_path):
    return write_store(
        tmp_path / "store",
        train=arrays([0, 3, 4, 1], [0, 5, 1], [0, 6, 7, 8, 1]),
        held_out=arrays([0, 3, 1]),
        vocabulary=WORDS,
        shards=2,
    )


def test_a_user_reads_back_as_written(small):
    assert small.train.tokens(0).tolist() == [0, 3, 4, 1]
    assert small.train.tokens(1).tolist() == [0, 5, 1]
    assert small.train.tokens(2).tolist() == [0, 6, 7, 8, 1]
    assert small.held_out.tokens(0).tolist() == [0, 3, 1]


def test_a_cohort_comes_in_the_order_asked_for_even_with_a_user_twice(small):
    assert [u.tolist() for u in small.train.users(np.array([2, 0, 2]))] == [
        [0, 6, 7, 8, 1],
        [0, 3, 4, 1],
        [0, 6, 7, 8, 1],
    ]
    assert small.train.lengths(np.array([2, 0, 2])).tolist() == [5, 4, 5]


def test_an_empty_cohort_can_be_read(small):
    assert small.train.users(np.array([], dtype=np.int64)) == []
    flat, lengths = small.train.concatenated(np.array([2, 0, 2]))
    assert flat.tolist() == [i for k in (2, 0, 2) for i in small.train.tokens(k).tolist()]
    assert lengths.tolist() == [len(small.train.tokens(k)) for k in (2, 0, 2)]
    assert small.train.lengths(np.array([], dtype=np.int64)).tolist() == []


def test_sizes_are_known_on_opening(small):
    assert (small.train.num_users, small.train.num_tokens, small.held_out.num_users) == (3, 12, 1)
    assert small.train.lengths().tolist() == [4, 3, 5]
    assert small.public is None
    assert small.test_posts is None


def test_a_user_outside_the_split_is_refused(small):
    for k in (-1, 3, -3):
        with pytest.raises(IndexError, match="out of range"):
            small.train.tokens(k)
        for cohort in ([k], [0, k], [k, 2]):
            with pytest.raises(IndexError, match="outside users 0 to 2"):
                small.train.users(np.array(cohort))
            with pytest.raises(IndexError, match="outside users 0 to 2"):
                small.train.lengths(np.array(cohort))


def test_long_users_are_read_like_short_ones(tmp_path):
    users = [np.arange(n) % 11 for n in (900, 3, 0, 1500, 700)]
    store = write_store(tmp_path / "store", train=users, held_out=[], vocabulary=WORDS, shards=2)
    for k, read in zip((4, 0, 2, 3), store.train.users(np.array([4, 0, 2, 3])), strict=True):
        np.testing.assert_array_equal(read, users[k])


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 10), max_size=6), max_size=8),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_any_users_in_any_number_of_shards_read_back(tmp_path_factory, users, shards, random):
    path = tmp_path_factory.mktemp("any") / "store"
    store = write_store(path, train=arrays(*users), held_out=[], vocabulary=WORDS, shards=shards)
    cohort = [random.randrange(len(users)) for _ in range(5)] if users else []
    assert [u.tolist() for u in store.train.users(np.array(cohort, dtype=np.int64))] == [users[k] for k in cohort]
    assert [store.train.tokens(k).tolist() for k in range(len(users))] == users
    assert sum(len(block) for block in store.train.blocks(3)) == sum(map(len, users))
    in_shards = store.train.shard_of(np.arange(len(users)))
    tokens = [sum(len(users[k]) for k in np.flatnonzero(in_shards == shard)) for shard in range(store.shards)]
    assert store.train.tokens_of_shards().tolist() == tokens


def test_tokens_are_two_bytes_up_to_65536_words_and_four_above():
    assert token_dtype(1 << 16) == np.dtype("<u2")
    assert token_dtype((1 << 16) + 1) == np.dtype("<u4")


def test_opening_maps_nothing_until_a_user_is_read(small):
    again = TokenStore.open(small.path)
    assert all("tokens" not in vars(shard) for shard in again.train._shards)
    again.train.tokens(0)
    assert "tokens" in vars(again.train._shards[0])


def test_exact_counts_are_in_no_file_that_may_travel_and_only_the_owner_reads_them(tmp_path):
    with StoreWriter(tmp_path / "s") as writer:
        for split, users in (("train", arrays([0, 1])), ("held_out", [])):
            write_shard(writer.partial / split, 0, users, token_dtype(len(WORDS)))
        store = writer.finish(vocabulary=WORDS, info={}, counts={"users": 1}, shards=1)
    assert "users" not in (store.path / "corpus.json").read_text()
    assert "shards" not in (store.path / "corpus.json").read_text()
    assert store.counts == {"users": 1}
    for name in ("counts.json", "layout.json", "digests.json"):
        assert stat.S_IMODE(os.stat(store.path / name).st_mode) == 0o600


def test_a_missing_store_names_the_command_that_makes_one(tmp_path):
    with pytest.raises(CorpusMissing, match="unheard prepare"):
        TokenStore.open(tmp_path / "nothing")


def test_a_file_or_a_run_folder_is_not_taken_for_a_missing_store(tmp_path):
    (tmp_path / "posts.jsonl").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text("")
    with pytest.raises(
        CorpusMissing, match=r"is a file, not a token store.*unheard prepare .*posts\.jsonl --user-field"
    ):
        TokenStore.open(tmp_path / "posts.jsonl")
    with pytest.raises(CorpusMissing, match="is a run folder, not a token store"):
        TokenStore.open(tmp_path / "run")


def test_an_unfinished_store_is_not_a_store(tmp_path):
    path = tmp_path / "store"
    writer = StoreWriter(path, keep_partial=True)
    ShardWriter(writer.partial / "train", 0, np.dtype("<u2")).close()
    assert not path.exists()
    with pytest.raises(CorpusMissing, match="unfinished"):
        TokenStore.open(path)


def test_others_cannot_enter_a_store_nor_an_unfinished_one(tmp_path):
    mask = os.umask(0)
    try:
        writer = StoreWriter(tmp_path / "unfinished")
        assert stat.S_IMODE(os.stat(writer.partial).st_mode) == 0o700
        written = write_store(
            tmp_path / "whole",
            train=[np.array([0, 3, 1])],
            held_out=[np.array([0, 3, 1])],
            vocabulary=Vocabulary.of(["a"]),
        )
        assert stat.S_IMODE(os.stat(written.path).st_mode) == 0o700
    finally:
        os.umask(mask)


def test_a_failure_inside_the_writer_leaves_nothing_behind(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), StoreWriter(tmp_path / "store"):
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_a_finished_store_is_not_written_over(small):
    with pytest.raises(CorpusError, match="already exists"):
        write_store(small.path, train=[], held_out=[], vocabulary=WORDS)
    assert not partial_path(small.path).exists()


@pytest.mark.parametrize(
    "name", ["train/00000.tokens", "train/00001.offsets", "vocabulary.txt", "layout.json", "corpus.json"]
)
def test_a_file_cut_short_is_noticed_on_opening(small, name):
    file = small.path / name
    file.write_bytes(file.read_bytes().rstrip()[:-1])
    with pytest.raises(CorpusCorrupt):
        TokenStore.open(small.path)


@pytest.mark.parametrize(
    "name", ["train/00001.tokens", "train/00001.offsets", "held_out/00000.offsets", "layout.json", "vocabulary.txt"]
)
def test_a_lost_file_is_noticed_on_opening(small, name):
    (small.path / name).unlink()
    with pytest.raises((CorpusCorrupt, CorpusMissing)):
        TokenStore.open(small.path)


def flip_a_bit(file, byte=-3):
    content = bytearray(file.read_bytes())
    content[byte] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["train/00001.offsets", "held_out/00001.offsets", "layout.json"])
def test_a_flipped_bit_in_any_small_file_is_noticed_on_opening(small, name):
    """A flipped bit in the offsets moves one word from the first user to the second, and no file size changes."""
    flip_a_bit(small.path / name, 8 if name.endswith("offsets") else -1)
    with pytest.raises(CorpusCorrupt):
        TokenStore.open(small.path)


@pytest.mark.parametrize("name", ["train/00001.tokens", "held_out/00001.tokens", "counts.json", "corpus.json"])
def test_a_flipped_bit_in_any_file_is_noticed_by_the_full_check(small, name):
    assert small.check_files() == 12
    file = small.path / name
    if name == "corpus.json":
        file.write_text(file.read_text().replace("given", "takes"))
    else:
        flip_a_bit(file, 2 if name.endswith("tokens") else -1)
    with pytest.raises(CorpusCorrupt, match="does not have the content that it was written with"):
        TokenStore.open(small.path).check_files()


def test_an_id_outside_the_vocabulary_is_refused_when_it_is_read_and_its_folder_is_named(small):
    file = small.path / "train" / "00001.tokens"
    content = bytearray(file.read_bytes())
    content[3] = 255  # the high byte of the second token
    file.write_bytes(content)
    users = TokenStore.open(small.path).train
    with pytest.raises(CorpusCorrupt, match=r"train holds token ids outside the vocabulary"):
        users.concatenated(np.arange(users.num_users))
    size = len(small.vocabulary)
    for id, fits in ((size - 1, True), (size, False)):
        content[2:4] = id.to_bytes(2, "little")
        file.write_bytes(content)
        users = TokenStore.open(small.path).train
        with contextlib.nullcontext() if fits else pytest.raises(CorpusCorrupt, match="outside the vocabulary"):
            users.concatenated(np.arange(users.num_users))


def test_a_store_that_lost_its_digests_is_refused(small):
    (small.path / "digests.json").unlink()
    with pytest.raises(CorpusCorrupt, match=r"digests\.json"):
        TokenStore.open(small.path)


def test_a_store_of_a_version_without_digests_opens_and_says_that_nothing_was_checked(small):
    (small.path / "digests.json").unlink()
    info = json.loads((small.path / "corpus.json").read_text())
    del info["digests"]
    (small.path / "corpus.json").write_text(json.dumps(info))
    assert TokenStore.open(small.path).check_files() is None


def test_a_swapped_word_list_is_noticed_on_opening(small):
    (small.path / "vocabulary.txt").write_text((small.path / "vocabulary.txt").read_text().replace("a\nb\n", "b\na\n"))
    with pytest.raises(CorpusCorrupt, match="word list"):
        TokenStore.open(small.path)


def cut(file, count):
    file.write_bytes(file.read_bytes()[:-count])


def with_layout(path, **changes):
    file = path / "layout.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def without_middle_shard(path):
    """Renumber one shard. The number of shards does not change."""
    for ending in ("tokens", "offsets"):
        os.rename(path / "train" / f"00001.{ending}", path / "train" / f"00002.{ending}")


class Harmful:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path):
        self.made = str(path / "made")

    def __reduce__(self):
        return os.mkdir, (self.made,)


DAMAGES = {
    "offsets end inside a number": (lambda p: cut(p / "train/00000.offsets", 3), "is cut short"),
    "no offsets": (lambda p: (p / "train/00000.offsets").write_bytes(b""), "is cut short"),
    "fewer tokens than the offsets ask for": (lambda p: cut(p / "train/00001.tokens", 2), "where its offsets ask for"),
    "no tokens": (lambda p: (p / "train/00001.tokens").unlink(), "is missing, but its .offsets file exists"),
    "a shard with another number": (without_middle_shard, "does not have its 2 shards"),
    "another number of shards": (lambda p: with_layout(p, shards=1), "does not have its 1 shards"),
    "shards that are no number": (lambda p: with_layout(p, shards="2"), "does not fit the vocabulary"),
    "another dtype": (lambda p: with_layout(p, dtype="<u4"), "does not fit the vocabulary"),
    "features of fewer users": (
        lambda p: np.save(p / "train/features.npy", np.zeros((2, 2), np.float32)),
        "one row for",
    ),
    "features as integers": (
        lambda p: np.save(p / "train/features.npy", np.zeros((3, 2), np.int64)),
        "must be float32",
    ),
    "features in one row": (
        lambda p: np.save(p / "train/features.npy", np.zeros(3, np.float32)),
        "one row for each user",
    ),
    "features as a pickle": (
        lambda p: (p / "train/features.npy").write_bytes(pickle.dumps(Harmful(p))),
        "must be float32",
    ),
    "a pipe among the files": (lambda p: os.mkfifo(p / "pipe"), "is not a regular file"),
    "a pipe among the shards": (lambda p: os.mkfifo(p / "held_out" / "pipe"), "is not a regular file"),
}


@pytest.mark.parametrize("digests", ["none", "anew"])
@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_files_that_contradict_each_other_are_refused_without_the_help_of_digests(small, damage, words, digests):
    """A store of version 0.1.0 has no digests, and a forged store has digests that match its files."""
    damage(small.path)
    (small.path / "digests.json").unlink()
    if digests == "anew":
        write_digests(small.path)
    else:
        info = json.loads((small.path / "corpus.json").read_text())
        del info["digests"]
        (small.path / "corpus.json").write_text(json.dumps(info))
    with pytest.raises(CorpusCorrupt, match=words):
        TokenStore.open(small.path)
    assert not (small.path / "made").exists()  # no code in a store is executed


def test_the_digest_of_boundaries_follows_each_boundary_of_each_shard(tmp_path):
    digests = set()
    for number, lengths in enumerate(([2] * 6, [1, 3, 2, 2, 2, 2], [2, 2, 1, 3, 2, 2], [2, 2, 2, 2, 1, 3])):
        users = [np.full(length, 3) for length in lengths]
        written = write_store(tmp_path / str(number), train=users, held_out=[], vocabulary=WORDS, shards=3)
        digests.add(written.train.boundaries_digest())
    assert len(digests) == 4


def test_the_samples_of_a_store_follow_the_text_and_the_features_of_users_all_over_each_shard(tmp_path):
    """With 100 users per shard, at least one of two neighbouring users is compared."""
    users, features = np.arange(200), np.zeros((200, 2), np.float32)
    texts = [np.array([0, 3 + k % 5, 1]) for k in users]

    def samples(name: str, texts, features) -> list[str | None]:
        split = {"train": features}
        place = tmp_path / name
        return write_store(place, train=texts, held_out=[], vocabulary=WORDS, shards=2, features=split).train.samples()

    before = samples("before", texts, features)
    for number, k in enumerate((0, 49, 98, 100, 149, 198)):
        other = [*texts[:k], *[np.array([0, 8, 1])] * 2, *texts[k + 2 :]]
        marked = features + np.isin(users, (k, k + 1))[:, None].astype(np.float32)
        for after in (samples(f"text-{number}", other, features), samples(f"features-{number}", texts, marked)):
            assert [a == b for a, b in zip(before, after, strict=True)] == [k >= 100, k < 100]


@pytest.mark.parametrize("offsets", [[1, 4, 4], [0, 5, 4], [0, -1, 4]])
def test_users_who_overlap_are_refused_before_training(small, offsets):
    write_shard(small.path / "train", 1, arrays([0, 1], [3, 1]), np.dtype("<u2"))
    np.array(offsets, dtype="<i8").tofile(small.path / "train" / "00001.offsets")
    write_digests(small.path)
    with pytest.raises(CorpusCorrupt, match="users would overlap"):
        TokenStore.open(small.path).train.check_boundaries()


def test_a_store_of_another_format_is_refused(small):
    file = small.path / "corpus.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(CorpusCorrupt, match="format 99"):
        TokenStore.open(small.path)


def test_vocabulary_events_are_empty_for_a_public_vocabulary_and_kept_for_a_private_one(tmp_path, small):
    assert small.vocabulary_events == []
    events = [{"kind": "gaussian", "noise_multiplier": 2.0}, {"kind": "failure_probability", "delta": 1e-8}]
    info = {"vocabulary": {"kind": "private", "events": events}}
    assert write_store(tmp_path / "p", train=[], held_out=[], vocabulary=WORDS, info=info).vocabulary_events == events


def test_a_user_written_in_pieces_is_one_user(tmp_path):
    writer = ShardWriter(tmp_path, 0, np.dtype("<u2"))
    for piece in (b"\x00\x00", b"\x03\x00\x01\x00"):
        writer.write(piece)
    writer.end_user()
    writer.append_many(np.array([0, 1, 0, 4, 1]), np.array([2, 3]))
    writer.close()
    assert np.fromfile(tmp_path / "00000.offsets", dtype="<i8").tolist() == [0, 3, 5, 8]
    assert np.fromfile(tmp_path / "00000.tokens", dtype="<u2").tolist() == [0, 3, 1, 0, 1, 0, 4, 1]


def test_a_shard_with_offsets_has_all_of_its_tokens_on_disk(tmp_path, monkeypatch):
    """A process that dies at any moment leaves no offsets without the tokens that they point into."""
    steps, fsync, rename = [], os.fsync, os.replace

    def synced(descriptor):
        steps.append(("on disk", os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        fsync(descriptor)

    def renamed(before, after):
        status = os.stat(before)
        assert ("on disk", status.st_ino, status.st_size) in steps
        rename(before, after)
        steps.append(Path(after).name)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_shard(tmp_path / "train", 0, arrays([0, 3, 4, 1], [0, 5, 1]), np.dtype("<u2"))
    assert [step for step in steps if isinstance(step, str)] == ["00000.tokens", "00000.offsets"]
    assert steps[-1][1] == (tmp_path / "train").stat().st_ino
    assert sorted(os.listdir(tmp_path / "train")) == ["00000.offsets", "00000.tokens"]


def test_a_store_stands_for_its_path(store):
    assert Path(store) == store.path
    assert TokenStore.open(store).name == store.name


def test_the_content_digest_follows_every_token_and_boundary_of_training_users_and_nothing_else(tmp_path):
    """Stores that were prepared in the same way have the same name. With this digest, seeded runs on them share no noise."""

    def digest(train, held_out=((0, 3, 1),)):
        splits = {
            name: [np.array(tokens, dtype=np.uint16) for tokens in users]
            for name, users in (("train", train), ("held_out", held_out))
        }
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return write_store(folder, **splits, vocabulary=Vocabulary.of(["a", "b"])).content_digest

    first = digest([(0, 3, 4, 1), (0, 4, 1)])
    assert first == digest([(0, 3, 4, 1), (0, 4, 1)], held_out=((0, 4, 4, 1),))
    others = [digest([(0, 3, 3, 1), (0, 4, 1)]), digest([(0, 3, 4), (1, 0, 4, 1)]), digest([(0, 4, 1), (0, 3, 4, 1)])]
    assert len({first, *others}) == 4
