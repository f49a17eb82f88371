"""A private vocabulary in a whole `prepare`: the words, their order and their number depend only on the noisy sums."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.corpus.inputs import FIELDS, ONE_PROCESS, prepared, word_list, write_jsonl
from unheard import randomness
from unheard.cli.main import app
from unheard.corpus import private_vocabulary
from unheard.corpus.grouping import DuckDBBackend, SplitRule
from unheard.corpus.pipeline import VOCABULARY_KINDS, Preparation, build_store
from unheard.corpus.private_vocabulary import UNIT, CorpusVocabulary, PrivateVocabulary, WordRelease
from unheard.corpus.sources import find_sources
from unheard.corpus.store import StoreWriter, TokenStore, write_store
from unheard.corpus.transform import shrink_vocabulary
from unheard.corpus.vocabulary import FileVocabulary, PublicVocabulary, ReleaseLog, Vocabulary
from unheard.errors import CorpusCorrupt
from unheard.privacy.events import FailureProbability, Gaussian, to_record
from unheard.privacy.population_ledger import PopulationLedger, open_population_ledger
from unheard.privacy.population_statement import all_runs

CHOICE = PrivateVocabulary(epsilon=3.3, delta=1.2345e-3, size=9, words_per_user=3)
RULE = SplitRule(held_out=0.3)
USERS = {"a": 40, "b": 36, "c": 30, "d": 30, "e": 28, "f": 28, "g": 25, "h": 20, "i": 2, "j": 1, "k": 33, "l": 26}
"""How many users write each word; those with more than three words are left out."""


def rows():
    """Return the posts of users who write one, two or three words each."""
    users: list[list[str]] = [[] for _ in range(120)]
    for number, (word, count) in enumerate(USERS.items()):
        for k in range(count):
            users[(k * 7 + number * 11) % 120].append(word)
    lone = next(name for name in map(str, range(1000)) if RULE.split_of(name) == "train")
    written = [(f"u{i}", words) for i, words in enumerate(users) if 0 < len(words) <= 3]
    return [{"who": who, "what": " ".join(words), "when": 0} for who, words in [*written, (lone, ["rare", "other"])]]


def true_sums() -> dict[str, int]:
    """Return the sums of the votes of the training users, computed without the package."""
    sums: dict[str, int] = {}
    for row in rows():
        words = row["what"].split()
        if RULE.split_of(row["who"]) == "train":
            for word in words:
                sums[word] = sums.get(word, 0) + math.isqrt(UNIT * UNIT // len(words))
    return sums


class Scripted:
    """A generator that returns given normals, in the order of the words."""

    def __init__(self, normals):
        self.left = list(normals)

    def standard_normal(self, count):
        drawn, self.left = self.left[:count], self.left[count:]
        return np.array(drawn)


def test_words_order_and_cut_follow_the_noisy_sums_and_nothing_else(tmp_path, monkeypatch):
    sums = true_sums()
    words, release = sorted(sums), WordRelease.for_budget(3.3, 1.2345e-3, 3)
    sigma, top = release.noise_multiplier * UNIT, max(sums.values())
    most = sorted(words, key=lambda word: -sums[word])
    assert sums[most[-1]] < UNIT  # written by one user only
    # The two most frequent words are lost in the noise, and the rarest one comes first.
    normals = dict.fromkeys(words, 0.0) | {most[0]: -60.0, most[1]: -60.0, most[-1]: 90.0}
    # Two pairs of words that are a millionth of a vote apart, the rarer of the two with more noise: a smaller scale
    # changes the order of the first pair, and a larger one that of the second.
    for word, other, sign, level in ((most[5], most[2], 1, 5.0), (most[6], most[3], -1, 8.0)):
        normals[other] = level + (top - sums[other]) / sigma
        normals[word] = (sums[other] + normals[other] * sigma + sign * UNIT / 1e6 - sums[word]) / sigma
    noisy = {word: sums[word] + round(normals[word] * sigma) for word in words}
    passed = [word for word in words if noisy[word] > release.threshold()]
    expected = sorted(passed, key=lambda word: (-noisy[word], word))[: CHOICE.size - 3]
    # With the true sums the words, their order and the last word would be different.
    by_truth = sorted((w for w in words if sums[w] > release.threshold()), key=lambda w: (-sums[w], w))
    assert len(passed) > len(expected) > 5
    assert set(by_truth[: CHOICE.size - 3]) != set(expected)
    assert expected[0] == most[-1]
    assert by_truth[:2] == most[:2]
    assert not set(most[:2]) & set(expected)
    scripted = Scripted(normals[word] for word in words)
    monkeypatch.setattr("unheard.corpus.private_vocabulary.secure_generator", lambda: scripted)
    for out, shards in (("one", 1), ("three", 3)):
        scripted.left = [normals[word] for word in words]
        file = write_jsonl(tmp_path / "x.jsonl", rows())
        done = prepared(
            tmp_path, file, vocabulary=CHOICE, splits=RULE, shards=shards, out=out, backend=DuckDBBackend(workers=1)
        )
        assert list(done.store.vocabulary.words[3:]) == expected
        assert scripted.left == []  # one normal for each word that a training user wrote, and no more
        assert done.store.vocabulary_events == [to_record(event) for event in release.events()]


@pytest.fixture
def generators(monkeypatch):
    """Record the key of each generator by `id`, and the bytes that the operating system returned."""
    keys, given, kept = {}, [], []
    real_urandom, real_generator = randomness.os.urandom, randomness._generator

    def urandom(size):
        given.append(real_urandom(size))
        return given[-1]

    def generator(key):
        kept.append(real_generator(key))  # kept alive, so that no two generators have the same `id`
        keys[id(kept[-1])] = key
        return kept[-1]

    monkeypatch.setattr(randomness.os, "urandom", urandom)
    monkeypatch.setattr(randomness, "_generator", generator)
    return keys, given


def test_every_prepare_draws_its_noise_with_a_new_key_of_the_system(tmp_path, monkeypatch, generators):
    keys, given = generators
    used, drawn, real = [], [], WordRelease.release

    def seen(self, sums, generator):
        used.append(generator)
        result = real(self, sums, generator)
        drawn.append((result[1] - sums).tolist())
        return result

    monkeypatch.setattr(WordRelease, "release", seen)
    file = write_jsonl(tmp_path / "x.jsonl", rows())
    for out in ("first", "second"):
        prepared(tmp_path, file, vocabulary=CHOICE, splits=RULE, out=out)
    assert len(used) == 2
    assert all(id(generator) in keys for generator in used)
    chosen = [keys[id(generator)] for generator in used]
    assert len(set(chosen)) == 2
    assert {len(key) for key in chosen} == {16}
    assert set(chosen) <= set(given)
    assert not set(drawn[0]) & set(drawn[1])


def test_a_charge_in_the_log_of_draws_is_never_skipped(tmp_path):
    log = ReleaseLog(folder=tmp_path, request="r")
    events = [to_record(event) for event in WordRelease.for_budget(3.3, 1.2345e-3, 3).events()]
    log.charge(events)
    log.charge(events)
    assert log.events() == [*events, *events]
    whole = log.file.read_bytes()
    for end in (len(whole) - 2, len(whole) - 30, len(whole) // 2 + 5):
        log.file.write_bytes(whole[:end])
        with pytest.raises(CorpusCorrupt, match="damaged"):
            log.events()


def test_words_that_were_drawn_are_never_without_their_charge(tmp_path):
    logs = [ReleaseLog(folder=tmp_path, request=request * 32) for request in "ab"]
    for log in logs:
        log.charge([to_record(event) for event in PAID])
        log.save(Vocabulary.of("abc"))
    whole = logs[0].file.read_bytes()
    assert len(logs[0].events()) == 2 * len(PAID)
    first, second = whole.splitlines(keepends=True)
    smaller = whole.replace(b'"noise_multiplier": ', b'"noise_multiplier": 1')
    assert smaller != whole
    twice = (first + first, second + second)  # as many charges as draws, but of one draw
    for content in (b"", first, second, *twice, first + b"5\n", smaller, whole.replace(b"sha256", b"sha255")):
        logs[0].file.write_bytes(content)
        with pytest.raises(CorpusCorrupt, match="damaged"):
            logs[0].events()
    logs[0].file.unlink()
    with pytest.raises(CorpusCorrupt, match="damaged"):
        logs[0].events()
    logs[0].file.symlink_to("nowhere")
    with pytest.raises(CorpusCorrupt, match="damaged"):
        logs[0].events()


def test_words_of_different_blocks_have_noise_of_their_own(tmp_path, monkeypatch):
    """Noise is drawn for blocks of some thousand words; here each block is one word."""
    noise, real_summed, real_release = [], private_vocabulary.summed, WordRelease.release

    def one_by_one(*args):
        for words, sums in real_summed(*args):
            yield from (([word], sums[i : i + 1]) for i, word in enumerate(words))

    def release(self, sums, generator):
        passed, noisy = real_release(self, sums, generator)
        noise.extend((noisy - sums).tolist())
        return passed, noisy

    monkeypatch.setattr(private_vocabulary, "summed", one_by_one)
    monkeypatch.setattr(WordRelease, "release", release)
    file = write_jsonl(tmp_path / "x.jsonl", rows())
    prepared(tmp_path, file, vocabulary=CHOICE, splits=RULE, shards=1, out="s", backend=DuckDBBackend(workers=1))
    assert len(noise) == len(true_sums()) == len(set(noise))


PAID = [Gaussian(noise_multiplier=3.3), FailureProbability(delta=1.2e-5)]
"""The events that the vocabulary of another store cost."""
SOURCES = {
    "public": lambda folder: PublicVocabulary(size=50),
    "file": word_list,
    "corpus": lambda folder: CorpusVocabulary(path=str(folder / "other"), size=8),
    "private": lambda folder: CHOICE,
}


def store_with_paid_words(path):
    return write_store(
        path,
        train=[np.array([3, 4])],
        held_out=[np.array([5])],
        vocabulary=Vocabulary.of("abcdef"),
        info={"vocabulary": {"kind": "private", "events": [to_record(event) for event in PAID]}},
    )


@pytest.mark.parametrize("kind", [kind for kind in VOCABULARY_KINDS if kind != "tokenizer"])
def test_every_draw_for_a_store_is_paid_also_those_of_calls_that_failed(tmp_path, monkeypatch, kind):
    """Two earlier calls drew words and failed. The store is charged for them, whatever vocabulary it has in the end."""
    listed = Vocabulary.of([*USERS, "rare", "other"])  # instead of the word list of a language, which takes seconds
    monkeypatch.setattr("unheard.corpus.vocabulary.public_vocabulary", lambda *_: listed)
    store_with_paid_words(tmp_path / "other")
    earlier = [[to_record(e) for e in WordRelease.for_budget(eps, 1e-4, 2).events()] for eps in (1.0, 2.0)]
    (tmp_path / "s.partial").mkdir()
    for n, events in enumerate(earlier):
        ReleaseLog(folder=tmp_path / "s.partial", request=f"another {n}").charge(events)
    file = write_jsonl(tmp_path / "x.jsonl", rows())
    done = prepared(tmp_path, file, vocabulary=SOURCES[kind](tmp_path), splits=RULE, shards=1, out="s")
    own = {"private": WordRelease.for_budget(3.3, 1.2345e-3, 3).events(), "corpus": PAID}.get(kind, [])
    paid = [*earlier[0], *earlier[1], *(to_record(event) for event in own)]
    assert sorted(map(repr, done.store.vocabulary_events)) == sorted(map(repr, paid))


@pytest.mark.parametrize("way", ["fewer words", "newer text", "the same users"])
def test_a_store_that_is_made_from_another_states_what_the_words_of_the_other_have_cost(tmp_path, way):
    """No run was trained on either store. The ledger of the new store begins with the charges of the first store."""
    first, out = store_with_paid_words(tmp_path / "first"), tmp_path / "out"
    if way == "fewer words":
        shrink_vocabulary(first, out, vocabulary_size=5)
    elif way == "newer text":
        sources = find_sources([str(write_jsonl(tmp_path / "x.jsonl", rows()))])
        choices = Preparation(fields=FIELDS, splits=RULE, vocabulary=word_list(tmp_path), shards=1)
        build_store(sources, out, choices, backend=ONE_PROCESS, continues=first.path)
    else:
        write_store(out, train=[np.array([3])], held_out=[np.array([3])], vocabulary=Vocabulary.of("a"))
        asked = ["budget", str(out), "--same-users", str(first.path), "--delta=1e-3"]
        assert CliRunner().invoke(app, asked).exit_code == 0
    for store in (out, first.path):
        population = PopulationLedger.read(store / "ledger.jsonl")
        assert population.events == PAID
        assert all_runs(population, delta=1e-3)["charges"] == len(PAID)


def test_what_was_paid_is_on_disk_before_a_store_is_at_its_path(tmp_path, monkeypatch):
    """A process that is killed just after it moved the store to its path leaves a store with every charge."""
    first = store_with_paid_words(tmp_path / "first")
    sources = find_sources([str(write_jsonl(tmp_path / "x.jsonl", rows()))])
    choices = Preparation(fields=FIELDS, splits=RULE, vocabulary=word_list(tmp_path), shards=1)
    (tmp_path / "out.partial").mkdir()
    drawn = [to_record(event) for event in PAID]
    ReleaseLog(folder=tmp_path / "out.partial", request="r").charge(drawn)
    publish, before = StoreWriter.publish, []

    def killed(writer):
        before.append((writer.partial / "releases.jsonl").exists())
        publish(writer)
        raise KeyboardInterrupt

    monkeypatch.setattr(StoreWriter, "publish", killed)
    with pytest.raises(KeyboardInterrupt):
        build_store(sources, tmp_path / "out", choices, backend=ONE_PROCESS, continues=first.path)
    assert before == [True]
    store = TokenStore.open(tmp_path / "out")
    assert store.vocabulary_events == drawn
    population = open_population_ledger(store.path, store.name, store.vocabulary_events)
    assert len(population.events) == 2 * len(PAID)


def test_two_draws_that_give_the_same_words_are_both_charged(tmp_path, monkeypatch):
    """The newer store has the same words, choices and name, so nothing but the number of the draw is different."""
    silent = SimpleNamespace(standard_normal=np.zeros)
    monkeypatch.setattr("unheard.corpus.private_vocabulary.secure_generator", lambda: silent)
    sources = find_sources([str(write_jsonl(tmp_path / "x.jsonl", rows()))])
    choices = Preparation(fields=FIELDS, splits=RULE, vocabulary=CHOICE, shards=1)
    stores = []
    for month in ("may", "june", "july"):
        (tmp_path / month).mkdir()
        continues = stores[-1].path if stores else None
        done = build_store(sources, tmp_path / month / "chat", choices, backend=ONE_PROCESS, continues=continues)
        stores.append(done.store)
    cost = WordRelease.for_budget(3.3, 1.2345e-3, 3).events()
    assert len({store.vocabulary.digest for store in stores}) == 1
    assert len({store.name for store in stores}) == 3
    assert PopulationLedger.read(stores[-1].path / "ledger.jsonl").events == 3 * cost
    # Words that were drawn once are one draw wherever they are used.
    again = Preparation(fields=FIELDS, splits=RULE, vocabulary=CorpusVocabulary(path=str(stores[0].path)), shards=1)
    used = build_store(sources, tmp_path / "used", again, backend=ONE_PROCESS).store
    listed = Preparation(
        fields=FIELDS, splits=RULE, vocabulary=FileVocabulary(path=str(stores[0].path / "vocabulary.txt")), shards=1
    )
    named = build_store(sources, tmp_path / "named", listed, backend=ONE_PROCESS).store
    draws = [store.info["vocabulary"]["draws"] for store in (*stores, used, named)]
    assert draws[4] == draws[3] == draws[0]
    assert [len(numbers) for numbers in draws] == [1, 1, 1, 1, 1]
    assert len({number for numbers in draws for number in numbers}) == 3
