"""A store in parts: no rank has the text of all users, and the run is the same."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import unheard
from tests.engines.distributed.forks import LeaderFailed, on_ranks
from tests.stores import forget_charges
from unheard.cli.main import app
from unheard.corpus.store import TokenStore, write_store
from unheard.corpus.transform import shards_of_part, split_store
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed.engine import StoreReplicas, shard_holders, store_fingerprint
from unheard.errors import CorpusError, InvalidValue, LedgerError
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import PopulationLedger
from unheard.training.checkpoint import load_model
from unheard.training.loop import train_together

PARTS = 3


def quietly(what: str, share: float) -> None: ...


@pytest.fixture
def whole(store, tmp_path) -> TokenStore:
    """Write the small store in five shards."""
    return write_store(
        tmp_path / "whole",
        train=store.train.users(np.arange(store.train.num_users)),
        held_out=store.held_out.users(np.arange(store.held_out.num_users)),
        vocabulary=store.vocabulary,
        info={"tokens": {"kind": "words"}},
        shards=5,
    )


@pytest.fixture
def parts(whole, tmp_path) -> list[TokenStore]:
    PopulationLedger.open(whole.path / "ledger.jsonl", {"corpus": whole.name})
    return [split_store(whole, tmp_path / f"part-{k}", part=k + 1, of=PARTS, progress=quietly) for k in range(PARTS)]


@pytest.fixture
def seeded(run, whole):
    return replace(run, corpus=whole.path, training=unheard.Training(rounds=2, reproducible_seed=3))


def test_every_shard_is_in_one_part_and_the_rest_in_all(whole, parts):
    held = np.stack([part.train.shards_here for part in parts])
    assert held.sum(axis=0).tolist() == [1] * 5
    assert held.any(axis=1).all()
    for part in parts:
        assert part.name == whole.name
        assert part.train.boundaries_digest() == whole.train.boundaries_digest()
        assert part.held_out.shards_here.all()
        mine = np.flatnonzero(part.train.shards_here[part.train.shard_of(np.arange(60))])
        for ours, theirs in zip(part.train.users(mine), whole.train.users(mine), strict=True):
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(("shards", "of"), [(1, 1), (5, 5), (7, 3), (9, 8)])
def test_parts_are_never_empty_and_never_overlap(store, tmp_path, shards, of):
    made = write_store(
        tmp_path / "s",
        train=[*store.train.users(np.arange(20)), *[np.zeros(1, dtype=int)] * 5],
        held_out=[],
        vocabulary=store.vocabulary,
        shards=shards,
    )
    found = [shards_of_part(made, k, of) for k in range(1, of + 1)]
    assert all(found)
    assert [shard for part in found for shard in part] == list(range(shards))


def test_a_run_on_parts_is_the_run_on_the_whole(seeded, model, parts, tmp_path):
    engine = EngineChoice(device="cpu", corpus_part=str(tmp_path / "part-{rank}"))
    list(unheard.train(seeded, tmp_path / "alone", engine=EngineChoice(device="cpu")))

    def lead(ranks):
        list(unheard.train(seeded, tmp_path / "r", engine=engine, ranks=ranks))

    on_ranks(PARTS, lead)
    ours, theirs = (load_model(tmp_path / name / "model.safetensors", model) for name in ("r", "alone"))
    assert torch.equal(ours, theirs)


def test_a_shard_that_nobody_holds_is_named_before_anything_is_charged(seeded, parts, tmp_path):
    engine = EngineChoice(device="cpu", corpus_part=str(tmp_path / "part-{rank}"))

    def lead(ranks):
        list(unheard.train(seeded, tmp_path / "r", engine=engine, ranks=ranks))

    with pytest.raises(LeaderFailed, match=r"No rank holds shard 0000\d"):
        on_ranks(PARTS - 1, lead)
    assert not (tmp_path / "r").exists()


def test_another_corpus_on_a_rank_is_refused(seeded, parts, store, tmp_path):
    """With copies that divide the text into users differently, one person could be summed twice."""
    shutil.rmtree(tmp_path / "part-1")
    write_store(
        tmp_path / "part-1",
        train=[*store.train.users(np.arange(59)), np.zeros(3, dtype=int)],
        held_out=store.held_out.users(np.arange(10)),
        vocabulary=store.vocabulary,
        info={"tokens": {"kind": "words"}},
        shards=5,
    )
    engine = EngineChoice(device="cpu", corpus_part=str(tmp_path / "part-{rank}"))

    def lead(ranks):
        list(unheard.train(seeded, tmp_path / "r", engine=engine, ranks=ranks))

    with pytest.raises(LeaderFailed, match="Rank 1 has another store"):
        on_ranks(2, lead)


def of_users(path, users, store, **info) -> TokenStore:
    info = {"tokens": {"kind": "words"}, **info}
    held_out = store.held_out.users(np.arange(10))
    return write_store(path, train=users, held_out=held_out, vocabulary=store.vocabulary, info=info, shards=5)


def test_parts_of_another_store_than_the_one_that_is_charged_are_refused(seeded, whole, store, tmp_path):
    """All ranks have the same store, but not that of the run: other users would be summed than those who are charged."""
    of_users(tmp_path / "other", whole.train.users(np.arange(60)), store, name="of other people")
    engine = EngineChoice(device="cpu", corpus_part=str(tmp_path / "other"))

    def lead(ranks):
        list(unheard.train(seeded, tmp_path / "r", engine=engine, ranks=ranks))

    with pytest.raises(LeaderFailed, match="Rank 0 has another store than the run's"):
        on_ranks(2, lead)


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_copy_that_numbers_equally_long_users_otherwise_is_refused(seeded, store, tmp_path, as_parts):
    """All users of the paper have 1,600 tokens, so the offsets do not show which user is which."""
    users = [np.resize(one, 40) for one in store.train.users(np.arange(60))]
    copies = [
        of_users(tmp_path / "one", users, store, name="one"),
        of_users(tmp_path / "two", [*users[1:], users[0]], store, name="one"),
    ]
    assert copies[0].name == copies[1].name
    assert copies[0].train.boundaries_digest() == copies[1].train.boundaries_digest()
    if as_parts:  # that have no shard in common
        for k, copy in enumerate(copies):
            split_store(copy, tmp_path / f"part-{k}", part=k + 1, of=2, progress=quietly)
    else:
        for k, copy in enumerate(copies):
            shutil.copytree(copy.path, tmp_path / f"part-{k}")
    engine = EngineChoice(device="cpu", corpus_part=str(tmp_path / "part-{rank}"))
    run = replace(seeded, corpus=tmp_path / "one")

    def lead(ranks):
        list(unheard.train(run, tmp_path / "r", engine=engine, ranks=ranks))

    with pytest.raises(LeaderFailed, match="Rank 1 has another store"):
        on_ranks(2, lead)


@pytest.mark.parametrize("as_parts", [False, True])
def test_a_copy_that_knows_other_things_about_its_users_is_refused(store, tmp_path, as_parts):
    """If rows of `features.npy` are in another order, one user's features would be used in another user's update."""
    known = np.random.default_rng(1).normal(size=(60, 2))
    looks = []
    for k, rows in enumerate((known, known[::-1])):
        copy = write_store(
            tmp_path / f"whole-{k}",
            train=store.train.users(np.arange(60)),
            held_out=store.held_out.users(np.arange(10)),
            vocabulary=store.vocabulary,
            info={"tokens": {"kind": "words"}},
            features={"train": rows},
            shards=5,
        )
        if as_parts:
            copy = split_store(copy, tmp_path / f"part-{k}", part=k + 1, of=2, progress=quietly)
        looks.append(look(copy))
    whole = TokenStore.open(tmp_path / "whole-0")
    assert shard_holders([looks[0], look(whole)], whole).any()
    with pytest.raises(CorpusError, match="Rank 1 has another store"):
        shard_holders(looks, whole)


def look(store: TokenStore) -> np.ndarray:
    return np.concatenate([store_fingerprint(store, store.train), store.train.shards_here.astype(np.int64)])


def test_a_part_whose_text_was_replaced_is_refused(seeded, parts, tmp_path):
    held = [int(k) for k in np.flatnonzero(parts[0].train.shards_here)]
    file = tmp_path / "part-0" / "train" / f"{held[0]:05d}.tokens"
    file.write_bytes(file.read_bytes()[::-1])
    engine = EngineChoice(device="cpu", corpus_part=str(tmp_path / "part-{rank}"))

    def lead(ranks):
        list(unheard.train(seeded, tmp_path / "r", engine=engine, ranks=ranks))

    with pytest.raises(LeaderFailed, match="differs from its whole store"):
        on_ranks(PARTS, lead)


def test_a_part_alone_is_not_trained_on(seeded, parts, tmp_path):
    alone = replace(seeded, corpus=parts[0].path, ledger=tmp_path / "people.jsonl")
    with pytest.raises(CorpusError, match="a part of a store"):
        list(unheard.train(alone, tmp_path / "r"))
    with pytest.raises(CorpusError, match="not in this part"):
        parts[0].train.users(np.arange(60))


def test_a_single_process_refuses_a_corpus_part(seeded, model, whole, parts, tmp_path):
    """An earlier version ignored the option. A run that began on parts continues in one process with the whole store."""
    engine = EngineChoice(device="cpu", corpus_part=str(tmp_path / "part-{rank}"))
    with pytest.raises(InvalidValue, match=r"engine\.corpus_part = '.*part-\{rank\}' .* this process is alone"):
        list(unheard.train(seeded, tmp_path / "r", engine=engine))
    with pytest.raises(InvalidValue, match="this process is alone"):
        list(train_together([(seeded, tmp_path / "r")], engine=engine))
    assert not (tmp_path / "r").exists()

    def lead(ranks):
        list(unheard.train(seeded, tmp_path / "r", engine=engine, ranks=ranks))

    on_ranks(PARTS, lead)
    with pytest.raises(InvalidValue, match="to resume alone, name the whole store with --corpus"):
        list(unheard.resume(tmp_path / "r", rounds=3))
    assert [report.round for report in unheard.resume(tmp_path / "r", rounds=3, corpus=whole.path)] == [3]


def test_a_part_has_no_ledger_of_its_own(seeded, whole, parts, tmp_path):
    """The population has one ledger. A run whose leader has a part must name it."""
    assert not any((part.path / "ledger.jsonl").exists() for part in parts)
    engine = EngineChoice(device="cpu", corpus_part=str(tmp_path / "part-{rank}"))

    def lead(ledger):
        def work(ranks):
            run = replace(seeded, corpus=parts[0].path, ledger=ledger)
            list(unheard.train(run, tmp_path / "r", engine=engine, ranks=ranks))

        return work

    with pytest.raises(LeaderFailed, match="ledger of its users belongs to the whole one"):
        on_ranks(PARTS, lead(None))
    assert not (tmp_path / "r").exists()
    forget_charges(whole.path)
    on_ranks(PARTS, lead(whole.path / "ledger.jsonl"))
    assert len(Ledger.read(tmp_path / "r" / "ledger.jsonl")) == 2
    assert (whole.path / "ledger.jsonl").exists()
    done = CliRunner().invoke(app, ["budget", str(parts[1].path)])
    assert isinstance(done.exception, LedgerError)


def test_the_owners_files_stay_with_the_whole_store(whole, tmp_path):
    """Exact counts and the carriers of canaries are not copied to parts, which do not need them."""
    (whole.path / "canaries.json").write_text("[]")
    assert (whole.path / "counts.json").exists()
    part = split_store(whole, tmp_path / "part", part=1, of=2, progress=quietly)
    beside = {path.name for path in part.path.iterdir()}
    assert beside == {"corpus.json", "digests.json", "layout.json", "part.json", "vocabulary.txt", "train", "held_out"}
    assert part.counts == {}


def test_other_files_in_the_stores_folder_are_not_copied(whole, tmp_path):
    """The owner may keep other files in the folder, such as the user map, a run, or the raw text."""
    for name in ("users.json", "train/users.csv", "runs/first/run.toml", ".ledger.jsonl.lock", "ledger.jsonl.bak"):
        (whole.path / name).parent.mkdir(parents=True, exist_ok=True)
        (whole.path / name).write_text("someone@example.org")
    part = split_store(whole, tmp_path / "part", part=1, of=2, progress=quietly)
    found = {path for path in part.path.rglob("*") if path.is_file()}
    assert not any(b"someone@example.org" in path.read_bytes() for path in found)
    assert {path.suffix for path in found if path.parent != part.path} == {".tokens", ".offsets"}


def test_tokens_that_are_lost_from_a_whole_store_are_still_damage(whole):
    (whole.path / "train" / "00002.tokens").unlink()
    with pytest.raises(CorpusError, match=r"missing, but its \.offsets file exists"):
        TokenStore.open(whole.path)


@pytest.mark.parametrize(
    ("part", "words"),
    [("2", "which part of how many"), ("0/3", "from 1 to 3"), ("4/3", "from 1 to 3"), ("1/6", "has 5 shards")],
)
def test_the_command_refuses_parts_that_cannot_be(whole, tmp_path, part, words):
    done = CliRunner().invoke(app, ["corpus", "part", str(whole.path), "--part", part, "--out", str(tmp_path / "p")])
    assert isinstance(done.exception, InvalidValue)
    assert words in str(done.exception)
    assert not (tmp_path / "p").exists()


def test_the_command_makes_a_part_and_never_a_part_of_one(whole, tmp_path):
    place = tmp_path / "p"
    done = CliRunner().invoke(app, ["corpus", "part", str(whole.path), "--part", "2/5", "--out", str(place)])
    assert done.exit_code == 0, done.output
    assert TokenStore.open(place).train.shards_here.tolist() == [False, True, False, False, False]
    assert (place / "part.json").stat().st_mode & 0o777 == 0o600
    done = CliRunner().invoke(app, ["corpus", "part", str(place), "--part", "1/2", "--out", str(tmp_path / "q")])
    assert isinstance(done.exception, CorpusError)


@pytest.mark.parametrize("template", ["/p/{host}", "/p/{}", "/p/{rank", "/p/{rank.real.x}", "/p/{node[0]}"])
def test_a_corpus_part_with_an_unknown_placeholder_is_refused(template):
    ranks = SimpleNamespace(rank=1, local_rank=0, node=2)
    with pytest.raises(InvalidValue, match="can be filled in"):
        StoreReplicas(ranks, template).here("/corpora/chat")  # pyright: ignore[reportArgumentType]
    assert str(StoreReplicas(ranks, "/p/{node}-{rank}").here("/corpora/chat")) == "/p/2-1"  # pyright: ignore[reportArgumentType]
