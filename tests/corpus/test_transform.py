"""A store with a smaller vocabulary equals the store that is prepared with the shorter word list."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.corpus.inputs import ONE_PROCESS, write_jsonl
from unheard.cli.main import app
from unheard.corpus.grouping import SplitRule
from unheard.corpus.pipeline import Preparation, build_store
from unheard.corpus.sources import Fields, find_sources
from unheard.corpus.store import TokenStore, write_store
from unheard.corpus.transform import shrink_vocabulary, split_store
from unheard.corpus.vocabulary import PublicVocabulary, Vocabulary, public_vocabulary
from unheard.errors import CorpusError, InvalidValue, LedgerError
from unheard.privacy.events import PoissonGaussian
from unheard.privacy.population_ledger import PopulationLedger, open_population_ledger

SAID = (
    "How are you today? I'm fine, thanks!",
    "the quick brown fox jumps over the lazy dog; mitochondria, perhaps",
    "see you at the rendezvous tomorrow (or not) zzyzx",
    "ornithology <UNK> is what she studies... don't laugh",
)


def files(folder):
    """All files except the ledger, which refers to the ledger of the first store."""
    found = (path for path in folder.rglob("*") if path.is_file() and "ledger" not in path.name)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def prepared(source, out, size) -> TokenStore:
    preparation = Preparation(
        fields=Fields(user="who", text="what"),
        vocabulary=PublicVocabulary(size=size),
        splits=SplitRule(held_out=0.3, public=0.1),
        test_tokens=40,
        shards=2,
    )
    return build_store(find_sources([str(source)]), out, preparation, backend=ONE_PROCESS).store


def test_a_narrowed_store_equals_a_prepared_one_byte_for_byte(tmp_path):
    rows = [{"who": f"u{k % 17}", "what": SAID[k % 4] + f" {SAID[k % 3]}"} for k in range(60)]
    source = write_jsonl(tmp_path / "posts.jsonl", rows)
    large, small = (prepared(source, tmp_path / name / "posts", n) for name, n in (("large", 5_000), ("small", 800)))
    assert files(large.path)["train/00000.tokens"] != files(small.path)["train/00000.tokens"]
    narrowed = shrink_vocabulary(large, tmp_path / "narrowed" / "posts", vocabulary_size=800)
    assert files(narrowed.path) == files(small.path)
    assert {"test_posts/00000.tokens", "public/00001.offsets"} <= set(files(narrowed.path))


def test_the_public_lists_of_the_paper_begin_alike():
    assert public_vocabulary(30_000).words[:10_000] == public_vocabulary(10_000).words


def large_store(path, **info) -> TokenStore:
    vocabulary = Vocabulary.of(f"w{i}" for i in range(70_000))
    users = [np.array([0, 3, 69_000, 9, 1]), np.array([0, 4, 10, 1])]
    kind = info.pop("kind", "file")
    return write_store(
        path, train=users, held_out=users[:1], vocabulary=vocabulary, info={"vocabulary": {"kind": kind}, **info}
    )


def test_ids_become_narrower_on_disk_and_everybody_keeps_their_length(tmp_path):
    made = shrink_vocabulary(large_store(tmp_path / "large"), tmp_path / "small", vocabulary_size=10)
    assert made.dtype == np.dtype("<u2")
    assert [user.tolist() for user in made.train.users(np.arange(2))] == [[0, 3, 2, 9, 1], [0, 4, 2, 1]]


def test_a_narrowed_store_has_the_users_and_the_ledger_of_the_first(tmp_path):
    large = large_store(tmp_path / "large")
    event = PoissonGaussian(sampling_prob=0.1, noise_multiplier=1.0)
    open_population_ledger(large.path, large.name, []).charge("before", 0, event, 0)
    made = shrink_vocabulary(large, tmp_path / "small", vocabulary_size=10)
    open_population_ledger(made.path, made.name, []).charge("after", 0, event, 0)
    for store in (large, made):
        assert PopulationLedger.read(store.path / "ledger.jsonl").events == [event, event]


def test_a_kill_while_narrowing_leaves_no_store_with_its_own_ledger(tmp_path, monkeypatch):
    """A smaller store without a reference to the first store's ledger would be charged on its own."""
    large = large_store(tmp_path / "large")

    def killed(self, other):
        raise KeyboardInterrupt

    monkeypatch.setattr(PopulationLedger, "join", killed)
    with pytest.raises(KeyboardInterrupt):
        shrink_vocabulary(large, tmp_path / "small", vocabulary_size=10)
    assert not (tmp_path / "small").exists()


def test_a_part_is_refused_and_gets_no_ledger(tmp_path):
    large = write_store(
        tmp_path / "large",
        train=[np.array([0, 3, 4, 1])] * 4,
        held_out=[np.array([0, 3, 1])],
        vocabulary=Vocabulary.of(f"w{i}" for i in range(20)),
        info={"vocabulary": {"kind": "file"}},
        shards=2,
    )
    part = split_store(large, tmp_path / "part", part=1, of=2, progress=lambda *_: None)
    with pytest.raises(CorpusError, match="whole store"):
        shrink_vocabulary(part, tmp_path / "small", vocabulary_size=10)
    with pytest.raises(CorpusError, match="is itself a part"):
        split_store(part, tmp_path / "half", part=1, of=2)
    assert not (part.path / "ledger.jsonl").exists()


def test_every_part_knows_the_digests_of_the_whole_store(tmp_path):
    """The streams of a seeded run depend on the text of all users, whichever part the leader has."""
    large = write_store(
        tmp_path / "large",
        train=[np.array([0, 3 + i, 4, 1]) for i in range(4)],
        held_out=[np.array([0, 3, 1])],
        vocabulary=Vocabulary.of(f"w{i}" for i in range(20)),
        info={"vocabulary": {"kind": "file"}},
        shards=2,
    )
    assert large.digests is not None
    for number in (1, 2):
        part = split_store(large, tmp_path / f"part{number}", part=number, of=2)
        assert part.digests is not None
        assert part.content_digest == large.content_digest
        assert large.digests.items() <= part.digests.items()


@pytest.mark.parametrize("size", [3, 70_004])
def test_an_impossible_size_is_refused(tmp_path, size):
    with pytest.raises(InvalidValue, match="Choose a size from 4 to"):
        shrink_vocabulary(large_store(tmp_path / "large"), tmp_path / "small", vocabulary_size=size)


@pytest.mark.parametrize("info", [{"kind": "tokenizer"}, {"canaries": True}])
def test_what_cannot_be_narrowed_by_rank_is_refused(tmp_path, info):
    with pytest.raises(CorpusError, match="prepare the corpus"):
        shrink_vocabulary(large_store(tmp_path / "large", **info), tmp_path / "small", vocabulary_size=10)
    assert not (tmp_path / "small").exists()


def test_corpus_narrow_writes_a_smaller_store(tmp_path):
    large_store(tmp_path / "large")
    asked = ["corpus", "narrow", str(tmp_path / "large"), "--vocab-size", "10", "--out", str(tmp_path / "small")]
    assert CliRunner().invoke(app, asked, catch_exceptions=False).exit_code == 0
    assert len(TokenStore.open(tmp_path / "small").vocabulary) == 10


def test_a_part_holds_the_words_the_choices_and_its_text_and_nothing_else_of_the_whole(tmp_path):
    """Counts, the carriers of canaries, ledgers and whatever else lies in the folder are for the owner of the whole."""
    users = [np.array([0, 3, 4, 1])] * 6
    whole = write_store(tmp_path / "whole", train=users, held_out=users[:2], vocabulary=Vocabulary.of("abc"), shards=2)
    for name in ("counts.json", "canaries.json", "ledger.jsonl", "users.csv", "notes.txt", "train/notes.txt"):
        (whole.path / name).write_text("private")
    part = split_store(whole, tmp_path / "part", part=2, of=2)
    shard = f"{part.shards - 1:05d}"
    assert {path.relative_to(part.path).as_posix() for path in part.path.rglob("*") if path.is_file()} == {
        *("corpus.json", "layout.json", "vocabulary.txt", "digests.json", "part.json"),
        *(f"{split}/{i:05d}.offsets" for split in ("train", "held_out") for i in range(2)),
        *(f"held_out/{i:05d}.tokens" for i in range(2)),
        f"train/{shard}.tokens",
    }


def test_a_whole_store_and_a_part_lack_no_file_but_what_a_part_has_elsewhere(tmp_path):
    """A part may lack the text of training users of other parts, and nothing else."""
    users = [np.array([0, 3, 4, 1])] * 6
    whole = write_store(
        tmp_path / "whole",
        train=users,
        held_out=users[:2],
        public=users[:2],
        vocabulary=Vocabulary.of("abc"),
        shards=2,
        features={name: np.ones((count, 1), np.float32) for name, count in (("train", 6), ("held_out", 2))},
    )
    part = split_store(whole, tmp_path / "part", part=1, of=2)
    for store in (whole, part):
        for path in sorted(path for path in store.path.rglob("*") if path.is_file()):
            away = path.rename(tmp_path / "away")
            name = path.relative_to(store.path).as_posix()
            if store is part and name.startswith("train/") and path.suffix == ".tokens":
                assert not TokenStore.open(store.path).train.shards_here[int(path.stem)]
            elif name == "ledgers.json":  # this file is read when the store is charged
                with pytest.raises(LedgerError):
                    open_population_ledger(store.path, store.name, [])
            else:
                with pytest.raises(CorpusError):
                    TokenStore.open(store.path)
            away.rename(path)
        TokenStore.open(store.path).check_files()
    # A part of a store of version 0.1.0 has no digests, and its shards are compared with each other.
    info = json.loads((part.path / "corpus.json").read_text())
    (part.path / "corpus.json").write_text(json.dumps({key: info[key] for key in info if key != "digests"}))
    (part.path / "digests.json").unlink()
    assert TokenStore.open(part.path).check_files() is None
    for name in ("held_out/00000.tokens", "public/00001.tokens", "train/00001.offsets", "held_out/00001.offsets"):
        away = (part.path / name).rename(tmp_path / "away")
        with pytest.raises(CorpusError):
            TokenStore.open(part.path)
        away.rename(part.path / name)
