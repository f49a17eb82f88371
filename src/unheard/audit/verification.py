"""Does a run folder fit together: ledger, configuration, checkpoints, model, statement, and the people's own ledger.

In: a run folder, and the store if it is at hand. Out: findings in plain words, each of which fits, does not, or could not be
checked. Nothing is written and nothing is mended. A folder that was made up as a whole cannot be told from a true one: the
chain is no signature (docs/threat-model.md).
One check, one finding: its name, whether it fits, and plain words for a person.

In: a check that yields sentences, and raises when something does not fit. Out: a Finding that no trouble can escape from.
Was every round charged for what it was: the events of a ledger against those that its configuration gives.

In: a run and its ledger. Out: a sentence, or the first charge that does not fit, by its line.
Do the people's own ledger and a run's agree: everything that the run was charged is charged to them too.

In: a run, its ledger, its checkpoints, and where the store lies. Out: a sentence, or what does not fit.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import RunFolderMissing, UnheardError
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import FailureProbability, Gaussian, PoissonGaussian, Selection
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import FILE, PopulationLedger, run_id
from unheard.privacy.statement import statement
from unheard.randomness import ReproducibleStreams, SecureStreams
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import Checkpoint, checkpoint_files, read_checkpoint, released_model
from unheard.training.run import Run
from unheard.training.run_file import read_saved_run, run_hash


class Trouble(UnheardError):
    """Something does not fit."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`fits` is None where the check could not be made, for a reason that is no fault of the run."""

    name: str
    fits: bool | None
    words: str


class Unknown(Trouble):
    """The check could not be made."""


def finding(name: str, check: Callable[[Any], Iterator[str]], about: Any) -> Finding:
    """Run one check. A refusal by any part of the library is a finding too, in that part's own words."""
    said: list[str] = []
    try:
        said.extend(check(about))
        return Finding(name=name, fits=True, words="; ".join(said))
    except Unknown as unknown:
        return Finding(name=name, fits=None, words=str(unknown))
    except UnheardError as trouble:
        return Finding(name=name, fits=False, words=str(trouble))
    except OSError as trouble:
        return Finding(name=name, fits=False, words=f"{trouble.strerror or trouble}: {trouble.filename or '?'}")


def check_charges(run: Run, ledger: Ledger) -> str:
    """Each entry from the first round on is the event that the plan gives for its round, and no round is skipped."""
    entries, layout, event_of = ledger.entries, run.model.layout, {}
    past = _charged_before_the_first_round(ledger)
    if past > len(entries) or any(entry.round for entry in entries[:past]):
        raise Trouble(f"the ledger says that {past} charges came before the first round, and does not have them.")
    reached = selected = rounds_of_selection(run, ledger)
    for number, entry in enumerate(entries[past:], start=past + 2):  # line 1 is the header
        if entry.round > reached:
            raise Trouble(
                f"ledger.jsonl, line {number}: round {entry.round} was charged, but round {reached} never was."
            )
        reached = max(reached, entry.round + 1)
        if entry.round not in event_of:
            event_of[entry.round] = run.plan.at(entry.round, layout).event()
        if entry.event != event_of[entry.round]:
            raise Trouble(
                f"ledger.jsonl, line {number}: round {entry.round} was charged as {entry.event}, but the run file makes it "
                f"{event_of[entry.round]}."
            )
    again = len(entries) - past - (reached - selected)
    words = f"{reached} rounds, each charged with the q and z of the run file"
    words += f" ({selected} of them in one charge: the best of several runs)" if selected else ""
    words += f"; {again} were done, and charged, again after a stop" if again else ""
    return words + (f"; {past} charges from before the first round" if past else "")


def rounds_of_selection(run: Run, ledger: Ledger) -> int:
    """How many rounds were charged at once because the run is the best of several; 0 for any other run."""
    told = ledger.facts.get("selection")
    if not told:
        return 0
    place = _charged_before_the_first_round(ledger) - 1
    charged = ledger.entries[place].event if 0 <= place < len(ledger) else None
    event = run.plan.at(0, run.model.layout).event()
    q_and_z = (event.sampling_prob, event.noise_multiplier) if isinstance(event, PoissonGaussian) else None
    if not isinstance(charged, Selection) or q_and_z != (charged.sampling_prob, charged.noise_multiplier):
        raise Trouble(
            "the run was selected among several, but was not charged as that with the q and z of the run file."
        )
    return charged.rounds


def _charged_before_the_first_round(ledger: Ledger) -> int:
    """The vocabulary, and the run that this one began from. An older ledger does not say how many: then by their kind."""
    told = (ledger.facts.get("start") or {}).get("charges")
    if isinstance(told, int):
        return told
    kinds = (Gaussian, FailureProbability)
    return next((i for i, entry in enumerate(ledger.entries) if not isinstance(entry.event, kinds)), len(ledger))


def check_population_ledger(
    run: Run, ledger: Ledger, checkpoints: Sequence[Checkpoint], corpus: str | Path | None = None
) -> str:
    """The store may well be elsewhere: then this could not be checked, and says so."""
    place = Path(run.ledger) if run.ledger is not None else Path(corpus or run.corpus) / FILE
    place = place / FILE if place.is_dir() else place
    if not place.is_file():
        raise Unknown(f"not checked: the store's ledger is not at {place} (name the store with --corpus)")
    try:
        population = PopulationLedger.read(place)
    except UnheardError as refusal:
        raise Trouble(f"the store's ledger cannot be believed: {refusal}") from None
    member = population.members.get(run_id(ledger))
    if member is None:
        raise Trouble(f"{population.path} knows nothing of this run: the store's people were not charged for it there.")
    if member.held < len(ledger):
        raise Trouble(
            f"{population.path} holds {member.held} of this run's {len(ledger)} charges: it was shortened or replaced."
        )
    for checkpoint in checkpoints:
        if checkpoint.population_position is not None and population.contains(checkpoint.population_position) is False:
            raise Trouble(
                f"{population.path} does not hold what it held at the checkpoint of round {checkpoint.state.round}: "
                "it was shortened."
            )
    return f"all charges of this run are in the store's ledger too, among those of {len(population.members)} runs"


EPSILON_SLACK = 1e-9
"""Two computations of one figure by one program agree to far better than this."""


@dataclass
class Folder:
    """What could be read of a run folder; what could not stays None, and the checks that need it say so."""

    path: RunFolder
    run: Run | None = None
    ledger: Ledger | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list)


def verify(path: str | Path, corpus: str | Path | None = None) -> list[Finding]:
    """Every check, in the order in which a reader would ask."""
    folder = Folder(RunFolder(Path(path)))
    if not folder.path.run_file.exists() and not folder.path.ledger.exists():
        raise RunFolderMissing(f"{path} is not a run folder: it has neither run.toml nor ledger.jsonl.")
    checks: list[tuple[str, Callable[[Folder], Iterator[str]]]] = [
        ("checkpoints read back", _checkpoints_read),  # before the ledger, which may grow while we look
        ("ledger", _ledger),
        ("configuration", _configuration),
        ("facts", _facts),
        ("charges", _charges),
        ("checkpoints", _checkpoints),
        ("model", _model),
        ("vocabulary", _vocabulary),
        ("metrics", _metrics),
        ("statement", _statement),
        ("people", lambda folder: _population(folder, corpus)),
        ("epsilon", _epsilon),
    ]
    return [finding(name, check, folder) for name, check in checks]


def _checkpoints_read(folder: Folder) -> Iterator[str]:
    files = checkpoint_files(folder.path)
    if not files:
        raise Trouble(f"{folder.path.checkpoints} holds no checkpoint: the run cannot go on, nor its model be checked.")
    for file in files:
        folder.checkpoints.append(read_checkpoint(file))
    yield f"{len(files)} kept, every byte as it was written"


def _ledger(folder: Folder) -> Iterator[str]:
    folder.ledger = Ledger.read(folder.path.ledger)
    yield f"{len(folder.ledger)} charges, each chained to the one before it"
    if folder.ledger.repaired:
        yield f"its end was torn by a crash ({folder.ledger.repaired.replace('has been', 'will be')} on resume)"


def _configuration(folder: Folder) -> Iterator[str]:
    folder.run, _ = read_saved_run(folder.path.run_file)
    if folder.ledger is None:
        raise Trouble("run.toml reads well, but there is no ledger to hold it against.")
    if folder.ledger.facts.get("run_hash") != run_hash(folder.run):
        raise Trouble("run.toml was changed after the run began: its hash is not the one in the ledger's first line.")
    yield "run.toml is the configuration that the ledger was begun with"


def _facts(folder: Folder) -> Iterator[str]:
    """The header's numbers, worked out anew: a header that was sealed with other numbers is found here."""
    run, ledger = _needed(folder.run, "run.toml"), _needed(folder.ledger, "the ledger")
    seed = run.training.reproducible_seed
    worked_out = {
        **run.plan.facts(run.model.layout),
        "delta": run.claimed_delta,
        "randomness": (SecureStreams() if seed is None else ReproducibleStreams(seed=seed)).describe(),
        "parameters": run.model.layout.total,
    }
    told = ledger.facts
    odd = sorted(key for key, value in worked_out.items() if _plain(told.get(key)) != _plain(value))
    if odd:
        raise Trouble(f"the ledger's first line tells other facts than run.toml gives: {', '.join(odd)}.")
    yield "population, q, weights, S, z, sensitivity, grid and delta follow from run.toml"


def _charges(folder: Folder) -> Iterator[str]:
    run, ledger = _needed(folder.run, "run.toml"), _needed(folder.ledger, "the ledger")
    yield check_charges(run, ledger)


def _checkpoints(folder: Folder) -> Iterator[str]:
    run, ledger = _needed(folder.run, "run.toml"), _needed(folder.ledger, "the ledger")
    for checkpoint in folder.checkpoints:
        round = checkpoint.state.round
        if not ledger.contains(checkpoint.ledger_length, checkpoint.ledger_head):
            raise Trouble(
                f"the checkpoint of round {round} was saved with a longer or another ledger: this one was shortened or replaced."
            )
        charged = {entry.round for entry in ledger.entries[: checkpoint.ledger_length]}
        charged |= set(range(rounds_of_selection(run, ledger)))
        if missing := sorted(set(range(round)) - charged):
            raise Trouble(f"the checkpoint is of round {round}, but round {missing[0]} was never charged before it.")
        if checkpoint.state.params_P.shape != (run.model.layout.total,):
            raise Trouble(f"the checkpoint of round {round} is not of the model that run.toml describes.")
    _needed(folder.checkpoints or None, "a whole checkpoint")
    rounds = ", ".join(str(c.state.round) for c in folder.checkpoints)
    yield f"of rounds {rounds}: each of their rounds was charged before they were saved"


def _model(folder: Folder) -> Iterator[str]:
    run = _needed(folder.run, "run.toml")
    newest = _needed(folder.checkpoints or None, "a whole checkpoint")[-1].state
    params_P, round = released_model(folder.path.model, run.model)
    same = next((c.state for c in folder.checkpoints if c.state.round == round), None)
    if same is None:
        raise Trouble(
            f"model.safetensors is of round {round}, of which there is no checkpoint (newest: {newest.round})."
        )
    if not torch.equal(params_P, same.params_P):
        raise Trouble(f"model.safetensors is not the model of its round's checkpoint ({round}): it was replaced.")
    yield f"model.safetensors is the model of the checkpoint of round {round}, to the bit"
    if round < newest.round:
        yield f"the checkpoint of round {newest.round} is newer: the run was stopped between two writes; resume mends it"


def _vocabulary(folder: Folder) -> Iterator[str]:
    run, ledger = _needed(folder.run, "run.toml"), _needed(folder.ledger, "the ledger")
    words = Vocabulary.load(folder.path.vocabulary)
    told = ledger.facts.get("vocabulary") or {}
    if told.get("sha256") not in (None, words.digest):
        raise Trouble("vocabulary.txt is not the word list that the ledger names.")
    if len(words) != run.model.vocabulary_size:
        raise Trouble(f"vocabulary.txt has {len(words)} words, the model {run.model.vocabulary_size} rows.")
    yield "vocabulary.txt is the word list that the run began with"


def _metrics(folder: Folder) -> Iterator[str]:
    run, ledger = _needed(folder.run, "run.toml"), _needed(folder.ledger, "the ledger")
    reached = max((entry.round for entry in ledger.entries), default=-1) + 1
    reached = max(reached, rounds_of_selection(run, ledger))
    rows = folder.path.read_metrics()
    late = [row["round"] for row in rows if not 0 < int(row["round"]) <= reached]
    if late:
        raise Trouble(f"metrics.jsonl tells of round {late[0]}, which was never charged.")
    yield f"{len(rows)} evaluations, all of rounds that were charged" if rows else "none yet"


def _statement(folder: Folder) -> Iterator[str]:
    ledger = _needed(folder.ledger, "the ledger")
    if not folder.path.statement.exists():
        yield "none is kept: the run is under way or was killed; `unheard statement` makes one from the ledger"
        return
    try:
        kept = json.loads(folder.path.statement.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise Trouble("statement.json is not JSON.") from None
    if not isinstance(kept, dict):
        raise Trouble("statement.json is no statement.")
    made = statement(ledger.facts, ledger.entries)
    wrong = sorted(key for key in made if key not in ("versions", "software") and not _agree(kept.get(key), made[key]))
    if wrong:
        raise Trouble(
            f"statement.json says other things than the ledger does: {', '.join(wrong)}. The ledger gives: {made['claim']}."
        )
    yield "statement.json says what the ledger gives, worked out anew"


def _population(folder: Folder, corpus: str | Path | None) -> Iterator[str]:
    run, ledger = _needed(folder.run, "run.toml"), _needed(folder.ledger, "the ledger")
    yield check_population_ledger(run, ledger, folder.checkpoints, corpus)


def _epsilon(folder: Folder) -> Iterator[str]:
    ledger = _needed(folder.ledger, "the ledger")
    delta = ledger.facts.get("delta")
    if not isinstance(delta, float) or not 0 < delta < 1:
        raise Trouble("the ledger declares no delta between 0 and 1.")
    bound = best_epsilon(ledger.events, delta)
    yield f"{bound.epsilon:.6g} at delta {delta:.3g} by {bound.accountant}, recomputed from the ledger"


def _needed(value: Any, what: str) -> Any:
    if value is None:
        raise Unknown(f"not checked: it needs {what}, which could not be read or does not fit")
    return value


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _agree(kept: Any, made: Any) -> bool:
    """Equal, but for the last digits of floats that another machine's library may round differently."""
    if isinstance(kept, float) and isinstance(made, float):
        return abs(kept - made) <= EPSILON_SLACK * max(1.0, abs(made))
    if isinstance(kept, dict) and isinstance(made, dict):
        return kept.keys() == made.keys() and all(_agree(kept[key], made[key]) for key in made)
    if isinstance(kept, list) and isinstance(made, list):
        return len(kept) == len(made) and all(map(_agree, kept, made))
    return kept == made
