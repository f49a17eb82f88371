"""Every file of a run folder and the population's ledger are compared, each with the right one and in the right order."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import unheard
from unheard import storage
from unheard.errors import CheckpointCorrupt, LedgerError, RunFolderMissing
from unheard.privacy import run_ledger
from unheard.privacy.events import Gaussian, PoissonGaussian, Selection
from unheard.privacy.ledger import Ledger, corpus_name
from unheard.privacy.population_ledger import FILE, PopulationLedger, open_population_ledger
from unheard.privacy.population_statement import find_population_ledger
from unheard.privacy.run_ledger import (
    JointLedger,
    SavedPosition,
    check_configuration,
    check_ledger,
    check_nodes,
    check_population,
    population_of,
    read_run_ledger,
    saved_positions,
    store_of,
)
from unheard.run_folder import RunFolder, configuration_hash
from unheard.training.checkpoint import _save

ROUND = PoissonGaussian(sampling_prob=1.0, noise_multiplier=9.0)
DELTA = 1.23456789e-3


@dataclass
class Place:
    """A run folder, a store and the ledger of its users, made of their public files alone."""

    store: Path
    folder: RunFolder
    joint: JointLedger

    def rounds(self, number: int, *, saved: bool = True) -> None:
        """Charge some rounds, and save a checkpoint and the model after the last one."""
        for _ in range(number):
            self.joint.charge(ROUND, len(self.joint))
        if saved:
            self.save()

    def save(self, **facts) -> None:
        number = len(self.joint)
        stated = {"round": number, "ledger_length": number, "ledger_head": self.joint.head}
        position = {"people": self.joint.position, "nodes": self.folder.nodes_digest()}
        self.joint.remember()
        _save(self.checkpoint(number), {"params": torch.zeros(1)}, {**stated, **position, **facts})
        _save(self.folder.model, {"params": torch.zeros(1)}, stated)

    def checkpoint(self, number: int) -> Path:
        return self.folder.checkpoints / f"round-{number:08d}.safetensors"


@pytest.fixture
def make(tmp_path) -> Callable[..., Place]:
    def made(name: str = "r", ledger: Path | None = None, **facts) -> Place:
        store, folder = tmp_path / "store", RunFolder(tmp_path / name)
        store.mkdir(exist_ok=True)
        (store / "corpus.json").write_text('{"name": "own"}')
        folder.checkpoints.mkdir(parents=True)
        named = "" if ledger is None else f"[privacy]\nledger = {str(ledger)!r}\n"
        folder.run_file.write_text(f"[corpus]\npath = {str(store)!r}\n{named}")
        stated = {"run_id": name, "population": 100, "delta": DELTA, "corpus": corpus_name({"name": "own"}), **facts}
        own = Ledger.create(folder.ledger, stated)
        population = open_population_ledger(store, "c", [], ledger)
        JointLedger.register(own, population, name)
        place = Place(store, folder, JointLedger(own, population))
        place.save()
        return place

    return made


def test_a_run_that_trains_while_it_is_read_is_no_false_alarm(make, monkeypatch):
    """After each file is read, the run is two rounds and a checkpoint further."""
    place = make()
    place.rounds(2)

    def and_train(read):
        def reading(*args):
            result = read(*args)
            place.rounds(2)
            return result

        return reading

    monkeypatch.setattr(run_ledger, "saved_positions", and_train(run_ledger.saved_positions))
    monkeypatch.setattr(run_ledger, "population_of", and_train(run_ledger.population_of))
    monkeypatch.setattr(Ledger, "read", and_train(Ledger.read))
    assert len(read_run_ledger(place.folder)) == 6
    assert len(place.joint) == 8


@pytest.mark.parametrize("times", [1, 3, 4, 5])
def test_a_checkpoint_that_is_deleted_while_it_is_read_is_looked_for_again(make, monkeypatch, times):
    place = make()
    place.rounds(2)
    listings = [[place.folder.checkpoints / f"gone-{i}"] for i in range(times)]
    listed, real = [], run_ledger.checkpoint_files
    monkeypatch.setattr(
        run_ledger,
        "checkpoint_files",
        lambda folder: (listed.append(1), [*listings, *[real(folder)] * 9][len(listed) - 1])[1],
    )
    if times == 5:
        with pytest.raises(CheckpointCorrupt, match="changes while it is read"):
            saved_positions(place.folder)
    else:
        assert [source.round for source in saved_positions(place.folder)] == [0, 2, 2]


@pytest.mark.parametrize("keeps", ["the store", "the ledger alone", "a store without corpus.json"])
def test_a_run_is_compared_with_every_ledger_that_is_on_this_machine(make, tmp_path, keeps):
    """Also if only the ledger was copied here, and the store is on another machine."""
    place = make(ledger=tmp_path / "people" / "named.jsonl")
    place.rounds(2)
    for number in (2, 3):  # charged by a later state of the folder, which was lost
        place.joint.population.charge("r", number, ROUND, number)
    if keeps != "the store":
        for file in place.store.glob("*"):
            file.unlink()
    if keeps == "the ledger alone":
        place.store.rmdir()
    known = population_of(place.folder)
    assert known is not None
    assert known.path == tmp_path / "people" / "named.jsonl"
    assert store_of(place.folder) == (place.store if keeps == "the store" else None)
    with pytest.raises(LedgerError, match="holds 4 charges of this run, the run's own ledger 2"):
        read_run_ledger(place.folder)


@pytest.mark.parametrize("which", [0, 2, 4, "model"])
@pytest.mark.parametrize("what", ["ledger_head", "ledger_length", "people"])
def test_the_positions_in_each_file_of_a_run_are_compared(make, which, what):
    place = make()
    place.rounds(2)
    place.rounds(2)
    number = 4 if which == "model" else which
    head = place.joint._ledger.hash_at(number)
    facts = {"round": number, "ledger_length": number, "ledger_head": head}
    position = place.joint.position
    wrong = {
        "ledger_head": "0" * 64,
        "ledger_length": number + 1 if number < 4 else 3,
        "people": {**position, "head": "0" * 64},
    }
    path = place.folder.model if which == "model" else place.checkpoint(number)
    assert len(read_run_ledger(place.folder)) == 4
    _save(path, {"params": torch.zeros(1)}, {**facts, "people": position, "nodes": None, what: wrong[what]})
    with pytest.raises(LedgerError) as error:
        read_run_ledger(place.folder)
    assert path.name in str(error.value)
    assert ("does not hold what was charged" in str(error.value)) == (what == "people")


@pytest.mark.parametrize("which", [0, 2, 4])
def test_the_record_of_the_nodes_is_compared_with_each_checkpoint(make, which):
    place = make()
    place.rounds(2)
    place.rounds(2)
    sources = saved_positions(place.folder)
    check_nodes(place.folder, sources)
    own = next(source for source in sources if source.round == which)
    others = [source for source in sources if source is not own]
    for nodes in ("0" * 64, ""):
        changed = SavedPosition(**{**vars(own), "nodes": nodes})
        with pytest.raises(LedgerError, match=r"federated\.json is not as it was"):
            check_nodes(place.folder, [*others, changed])
    check_nodes(place.folder, [SavedPosition(**{**vars(own), "nodes": "unknown"})])


@pytest.mark.parametrize("ahead", range(4))
@pytest.mark.parametrize("name", ["r", "reproducible-0"])
@pytest.mark.parametrize("way", ["once", "begun twice", "charged again"])
def test_a_population_has_at_most_one_charge_that_a_run_lacks(make, ahead, name, way):
    """A seeded run may be repeated in other folders, which release the same models."""
    place = make(name)
    place.rounds(2)
    for number in range(2, 2 + ahead):
        place.joint.population.charge(name, number, ROUND, number)
    if way == "begun twice":
        place.joint.population.register(name, {}, num_charged=0, is_new=True)
    if way == "charged again":
        place.joint.population.charge(name, 0, ROUND, 0)
    if ahead <= 1 or (name != "r" and way != "once"):
        assert len(read_run_ledger(place.folder)) == 2
    else:
        with pytest.raises(LedgerError, match=f"holds {2 + ahead} charges of this run, the run's own ledger 2"):
            read_run_ledger(place.folder)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("held", ["yes", "not any more", "of another ledger", "none"])
@pytest.mark.parametrize("among", [0, 1, 2])
def test_a_position_of_another_ledger_is_an_error_only_if_it_must_be_this_one(make, is_known, held, among):
    place = make()
    place.rounds(1)
    position = place.joint.position
    stated = {
        "yes": position,
        "not any more": {**position, "length": position["length"] + 1},
        "of another ledger": {**position, "ledger": "0" * 64},
        "none": None,
    }[held]
    sources = [
        SavedPosition(source=Path(f"{i}.file"), round=1, length=1, head="h", population_position=position)
        for i in range(3)
    ]
    sources[among] = SavedPosition(source=Path("wrong.file"), round=1, length=1, head="h", population_position=stated)
    population = place.joint.population
    if held == "not any more" or (held == "of another ledger" and is_known):
        with pytest.raises(LedgerError, match=r"up to wrong\.file: it was shortened or replaced"):
            check_population(population, "r", 1, sources, is_known=is_known)
    else:
        check_population(population, "r", 1, sources, is_known=is_known)


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("length", [3, 5, 7, None])
def test_a_file_of_n_rounds_needs_their_charges_among_the_entries_that_it_counts(tmp_path, length, extra):
    """The ledger has a vocabulary, a selection of two rounds and the rounds 2 to 6, of which 3 was repeated at once."""
    ledger = Ledger.create(tmp_path / "ledger.jsonl", {})
    ledger.charge(Gaussian(noise_multiplier=4.0), 0)
    ledger.charge(
        Selection(sampling_prob=1.0, noise_multiplier=9.0, rounds=2, mean_trials=2, drawn_from="geometric"), 0
    )
    for number in (2, 3, 3, 4, 5, 6):
        ledger.charge(ROUND, number)
    reached = {3: 3, 5: 4, 7: 6, None: 7}[length]
    head = None if length is None else ledger.hash_at(length)
    source = SavedPosition(source=Path("a.file"), round=reached + extra, length=length, head=head)
    if not extra:
        check_ledger(ledger, [source])
    else:
        with pytest.raises(
            LedgerError, match=f"a.file was saved after {reached + 1} rounds, but round {reached} was never"
        ):
            check_ledger(ledger, [source])


def test_the_run_file_is_the_one_whose_hash_the_ledger_has(make):
    tables = {"corpus": {"path": "any"}, "plan": {"population": 5}}
    place = make(run_hash=configuration_hash(tables))
    for population, fits in ((5, True), (6, False)):
        place.folder.run_file.write_text(f"[corpus]\npath = {str(place.store)!r}\n[plan]\npopulation = {population}\n")
        if fits:
            check_configuration(place.folder, Ledger.read(place.folder.ledger))
        else:
            with pytest.raises(LedgerError, match=r"run\.toml was changed after the run began"):
                check_configuration(place.folder, Ledger.read(place.folder.ledger))
            with pytest.raises(LedgerError, match=r"run\.toml was changed after the run began"):
                read_run_ledger(place.folder)


@pytest.mark.parametrize("delta", [None, 1e-2, 1e-6])
def test_a_folder_is_stated_at_the_delta_that_is_asked_for(make, tmp_path, delta):
    place = make()
    place.rounds(3)
    content = unheard.statement(place.folder.path, delta=delta)
    assert content["delta"] == (delta or DELTA)
    assert content["population"] == 100
    assert content["ledger"] == {"charges": 3, "head": place.joint.head}
    assert not [warning for warning in content["warnings"] if "only the ledger" in warning]
    with pytest.raises(RunFolderMissing, match=r"nowhere holds no ledger\.jsonl"):
        unheard.statement(tmp_path / "nowhere")


@pytest.mark.parametrize("wanted", [True, False])
def test_the_ledger_of_a_population_is_found_from_the_store_and_from_a_run_if_it_is_wanted(make, wanted):
    place = make()
    place.rounds(2)
    own, people = place.folder.ledger, place.store / FILE
    found = find_population_ledger(people, wanted)
    assert found is not None
    assert found.position == place.joint.position
    found = find_population_ledger(own, wanted)
    assert (found.path if found else None) == (people if wanted else None)
    storage.truncate(own, own.stat().st_size - 200, expected_size=own.stat().st_size)
    if wanted:
        with pytest.raises(LedgerError):
            find_population_ledger(own, wanted)
    copied = place.folder.path / "another-name.jsonl"
    copied.write_bytes(people.read_bytes())
    found = find_population_ledger(copied, wanted)
    assert found is not None  # by its first line, wherever it is
    assert found.events == [ROUND] * 2


@pytest.mark.parametrize("is_listed", [True, False])
def test_a_total_is_of_a_ledger_that_lists_the_run(make, is_listed):
    place = make()
    place.rounds(1)
    if not is_listed:  # begun anew, and the store and the checkpoints are of an older version
        (place.store / FILE).unlink()
        (place.store / "ledgers.json").unlink()
        for number in (0, 1):
            head = place.joint._ledger.hash_at(number)
            _save(
                place.checkpoint(number),
                {"params": torch.zeros(1)},
                {"round": number, "ledger_length": number, "ledger_head": head},
            )
        PopulationLedger.open(place.store / FILE, {}).register("another", {}, num_charged=0)
    if is_listed:
        found = find_population_ledger(place.folder.ledger, True)
        assert found is not None
        assert [*found.runs] == ["r"]
    else:
        with pytest.raises(LedgerError, match="does not list this run"):
            find_population_ledger(place.folder.ledger, True)


@pytest.mark.parametrize("missing", ["ledger_length", "ledger_head", "people", "nodes", "round"])
def test_each_fact_that_a_file_of_an_older_version_lacks_has_its_own_default(make, missing):
    place = make()
    place.rounds(1)
    facts = {
        "round": 1,
        "ledger_length": 1,
        "ledger_head": place.joint.head,
        "people": place.joint.position,
        "nodes": None,
    }
    kept = {name: fact for name, fact in facts.items() if name != missing}
    _save(place.checkpoint(1), {"params": torch.zeros(1)}, kept)
    source = saved_positions(place.folder)[1]
    shown = {
        "round": source.round,
        "ledger_length": source.length,
        "ledger_head": source.head,
        "people": source.population_position,
        "nodes": source.nodes,
    }
    assert shown == {**facts, missing: {"round": 0, "nodes": "unknown"}.get(missing)}
    _save(place.checkpoint(1), {"params": torch.zeros(1)}, {**facts, "round": "many"})
    with pytest.raises(CheckpointCorrupt, match=re.escape(str(place.checkpoint(1)))):
        saved_positions(place.folder)
