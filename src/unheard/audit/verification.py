"""Checks that the files of a run folder agree with each other and with the ledger of the store's population.

    for finding in verify("runs/first"):
        print(finding.name, finding.fits, finding.words)

`verify` recomputes everything that follows from the run file and the ledger: the events of all rounds, the facts in the
ledger's header, epsilon and the statement. It compares the model with its checkpoint, and the run's charges with those
in the population's ledger. It does not write or repair any file.

`verify` cannot detect a folder in which all files were forged to agree: the hash chain of a ledger is not a signature
(docs/threat-model.md).

Each check is a function that takes what could be read of the folder (`Folder`). It yields short sentences about what
agrees, and raises `CheckFailed` or `CheckSkipped` otherwise.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unheard.config import parse_json
from unheard.corpus.store import TokenStore, tokens_digest
from unheard.corpus.tokenizers import tokenizer_from_table
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import CodeNotTrusted, RunFolderMissing, UnheardError
from unheard.mechanism.correlated import CorrelatedNoise
from unheard.mechanism.sampling import GroupedSampling
from unheard.models.module import ModuleModel, no_code
from unheard.privacy.budget import claim_of_run, declaration
from unheard.privacy.events import (
    CorrelatedGaussian,
    FailureProbability,
    Gaussian,
    PoissonGaussian,
    Selection,
    to_record,
)
from unheard.privacy.ledger import Ledger, run_id
from unheard.privacy.matrix_factorization import Factorisation
from unheard.privacy.population_ledger import ledger_path, read_population_ledger
from unheard.privacy.run_ledger import check_ledger, check_nodes, check_population, saved_positions
from unheard.privacy.saved_statement import check_saved_statement
from unheard.run_folder import RunFolder, are_measures, not_a_run_folder
from unheard.training.checkpoint import (
    Checkpoint,
    checkpoint_files,
    read_checkpoint,
    recorded_layout,
    released_model,
)
from unheard.training.initialise import streams_of
from unheard.training.run import Run, read_saved_run, run_hash


class CheckFailed(UnheardError):
    """The check failed: files do not agree, or a file is missing or damaged."""


class CheckSkipped(UnheardError):
    """The check is impossible here, for example because the store is on another machine."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        name: The name of the check.
        fits: True if the files agree, False if they do not, None if the check was not possible.
        words: What the check found, as text for a reader.
    """

    name: str
    fits: bool | None
    words: str


@dataclass
class Folder:
    """What could be read of a run folder. The first checks fill it in.

    A part that could not be read stays None or empty, and the checks that need it are skipped.
    """

    path: RunFolder
    run: Run | None = None
    ledger: Ledger | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list)


Check = Callable[[Folder], Iterator[str]]
"""A function that makes one check.

It yields sentences about what agrees. If something does not agree, it raises `CheckFailed` or another error of the
library; if the check is not possible, it raises `CheckSkipped`.
"""


def verify(path: str | Path, corpus: str | Path | None = None) -> list[Finding]:
    """Make every check on a run folder.

    Args:
        path: The run folder.
        corpus: The present path of the run's store; None for the path in the run file.

    Returns:
        One finding for each check. A check may depend on the checks before it.

    Raises:
        RunFolderMissing: The folder has neither a run file nor the ledger of a run.
        RunFolderError: Something in the folder is not a regular file.
    """
    folder = Folder(RunFolder(Path(path)))
    folder.path.check_files()
    is_store = (Path(path) / "corpus.json").is_file()
    if not folder.path.run_file.exists() and (is_store or not folder.path.ledger.exists()):
        raise RunFolderMissing(not_a_run_folder(path))
    checks: list[tuple[str, Check]] = [
        ("checkpoints read back", _checkpoints_read),  # Before the ledger, which a run under way may extend.
        ("ledger", _ledger),
        ("configuration", _configuration),
        ("facts", _facts),
        ("correlated noise", _correlated_noise),
        ("charges", _charges),
        ("checkpoints", _checkpoints),
        ("model", _model),
        ("vocabulary", _vocabulary),
        ("tokens", lambda folder: _tokens(folder, corpus)),
        ("metrics", _metrics),
        ("measures", _measures),
        ("statement", _statement),
        ("population", lambda folder: _population(folder, corpus)),
        ("store", lambda folder: _store(folder, corpus)),
        ("epsilon", _epsilon),
    ]
    with no_code():  # The run file names code to import, and the folder may come from someone who is not trusted.
        return [_finding(name, check, folder) for name, check in checks]


def _finding(name: str, check: Check, folder: Folder) -> Finding:
    """Run one check and return its finding. An error of the library, or of the file system, is a failed check."""
    sentences: list[str] = []
    try:
        sentences.extend(check(folder))
        return Finding(name=name, fits=True, words="; ".join(sentences))
    except CheckSkipped as error:
        return Finding(name=name, fits=None, words=str(error))
    except CodeNotTrusted as error:
        return Finding(name=name, fits=None, words=f"not checked: {error}")
    except UnheardError as error:
        return Finding(name=name, fits=False, words=str(error))
    except OSError as error:
        return Finding(name=name, fits=False, words=f"{error.strerror or error}: {error.filename or '?'}")


def _checkpoints_read(folder: Folder) -> Iterator[str]:
    """Check that every checkpoint can be read and has the hash with which it was saved."""
    files = checkpoint_files(folder.path)
    if not files:
        raise CheckFailed(
            f"{folder.path.checkpoints} has no checkpoint: the run cannot be resumed, and its model cannot be checked."
        )
    for file in files:
        folder.checkpoints.append(read_checkpoint(file))
    yield f"{len(files)} kept, every byte as it was written"


def _ledger(folder: Folder) -> Iterator[str]:
    """Check the hash chain of the ledger. A last line that a crash left incomplete is allowed: `resume` removes it."""
    folder.ledger = Ledger.read(folder.path.ledger)
    yield f"{len(folder.ledger)} charges, each chained to the one before it"
    if folder.ledger.repaired:
        yield f"a crash left its last line torn ({folder.ledger.repaired.replace('has been', 'will be')} on resume)"


def _configuration(folder: Folder) -> Iterator[str]:
    """Check that the run file has the hash that is recorded in the ledger's header."""
    folder.run, _ = read_saved_run(folder.path.run_file)
    if isinstance(folder.run.model, ModuleModel) and folder.path.model.is_file():
        layout = recorded_layout(folder.path.model)
        if layout is not None:
            # The class of the model is not imported, so its layout is taken from the model's file.
            folder.run.model.__dict__["_layout"] = layout
    if folder.ledger is None:
        raise CheckFailed("run.toml can be read, but there is no ledger to compare it with.")
    if folder.ledger.facts.get("run_hash") != run_hash(folder.run):
        raise CheckFailed(
            "run.toml was changed after the run began: its hash is not the one in the ledger's first line."
        )
    yield "run.toml is the configuration that the ledger was begun with"


def _facts(folder: Folder) -> Iterator[str]:
    """Check that the facts in the ledger's header follow from the run file.

    This detects a header with other numbers whose hash was computed again.
    """
    run, ledger = _run_and_ledger(folder)
    expected = {
        **run.plan.facts(run.model.layout),
        "delta": run.claimed_delta,
        "randomness": streams_of(run, ledger.facts, "").describe(),
        "parameters": run.model.layout.total,
    }
    different = sorted(key for key, value in expected.items() if ledger.facts.get(key) != json.loads(json.dumps(value)))
    if different:
        raise CheckFailed(f"the ledger's first line states other facts than run.toml gives: {', '.join(different)}.")
    yield "population, q, weights, S, z, sensitivity, grid and delta follow from run.toml"
    if (declared := ledger.facts.get("declared")) is not None:  # Ledgers of older versions have no declaration.
        yield _declared(run, declared)


def _declared(run: Run, declared: Any) -> str:
    """Check the declaration in the ledger's header, and return a sentence about it.

    The declaration has the rounds, events and budget of the run. The claim of a run that stopped early depends on it.
    """
    phases = [(first, to_record(plan.event())) for first, plan in run.plan.phases(run.model.layout)]
    expected = json.loads(json.dumps(declaration(run.training.rounds, phases, run.budget)))
    rounds = declared.get("rounds") if isinstance(declared, dict) else None
    # DP: other events or another budget than those of run.toml would give a run a claim that its charges do not cover.
    if type(rounds) is not int or {**expected, "rounds": rounds} != declared:
        raise CheckFailed("the ledger's first line declares other events or another budget than run.toml gives.")
    if rounds == run.training.rounds:
        return "the declared rounds, events and budget are those of run.toml"
    return (
        f"the declared events and budget are those of run.toml; the claim is for the {rounds} rounds that were declared, "
        f"and run.toml now says {run.training.rounds}"
    )


def _correlated_noise(folder: Folder) -> Iterator[str]:
    """Check that the coefficients of correlated noise in the ledger's header have a proof and agree with the run file.

    The sensitivity is computed again from the header alone.
    """
    run, ledger = _run_and_ledger(folder)
    record, noise = ledger.facts.get("correlated_noise"), run.plan.noise
    if not isinstance(noise, CorrelatedNoise):
        if record is not None:
            raise CheckFailed("the ledger's first line describes correlated noise, and run.toml has none.")
        yield "none: the noise of each round is independent"
        return
    matrix = Factorisation.from_record(record)
    assert record is not None
    event = run.plan.at(0, run.model.layout).event()
    assert isinstance(event, CorrelatedGaussian)
    assert isinstance(run.plan.sampling, GroupedSampling)
    expected = (noise.strategy, noise.rounds, run.plan.sampling.rounds_apart(run.plan.population))
    if (matrix.strategy, matrix.rounds, matrix.separation) != expected:
        raise CheckFailed("the ledger's first line describes another correlated noise than run.toml.")
    stated = (record["sampling_prob"], record["noise_multiplier"], record["block"])
    if stated != (event.sampling_prob, event.noise_multiplier, event.block):
        raise CheckFailed("the ledger's first line states another q, z or block of rounds than run.toml gives.")
    yield (
        f"{matrix.strategy}, T = {matrix.rounds}, b = {matrix.separation}, k = {matrix.participations}: sensitivity "
        f"{matrix.sensitivity():.9g}, recomputed from the coefficients"
    )
    if folder.path.noise.exists():
        yield "keys and history of the noise are still there: they are deleted when the run is complete"


def _charges(folder: Folder) -> Iterator[str]:
    """Check that each charge from the first round on is the plan's event for its round, and no round is skipped."""
    run, ledger = _run_and_ledger(folder)
    entries, layout, events = ledger.entries, run.model.layout, {}
    past = _charges_before_training(ledger)
    if past > len(entries) or any(entry.round for entry in entries[:past]):
        raise CheckFailed(
            f"the header of the ledger declares {past} charges before the first round, but the ledger does not have them."
        )
    reached = selected = _rounds_of_selection(run, ledger)
    attempt = 0
    for line, entry in enumerate(entries[past:], start=past + 2):  # line 1 is the header
        if entry.round > reached:
            raise CheckFailed(
                f"ledger.jsonl, line {line}: round {entry.round} was charged, but round {reached} never was."
            )
        reached = max(reached, entry.round + 1)
        # With correlated noise the event depends on the number of the attempt. Attempt 0 begins a new mechanism.
        index = entry.event.index if isinstance(entry.event, CorrelatedGaussian) else 0
        if index not in (0, attempt):
            raise CheckFailed(f"ledger.jsonl, line {line}: attempt {index} follows {attempt - 1} attempts.")
        attempt = index + 1
        if (entry.round, index) not in events:
            events[entry.round, index] = run.plan.at(entry.round, layout).event(index)
        if entry.event != events[entry.round, index]:
            raise CheckFailed(
                f"ledger.jsonl, line {line}: round {entry.round} was charged as {entry.event}, but the run file makes it "
                f"{events[entry.round, index]}."
            )
    repeated = len(entries) - past - (reached - selected)
    words = f"{reached} rounds, each charged with the q and z of the run file"
    words += f" ({selected} of them in one charge: the best of several runs)" if selected else ""
    words += f"; {repeated} were repeated after a stop, and charged again" if repeated else ""
    yield words + (f"; {past} charges from before the first round" if past else "")


def _checkpoints(folder: Folder) -> Iterator[str]:
    """Check that the ledger still has everything that it had when each checkpoint was saved.

    Also checks that all rounds before a checkpoint were charged, and that each checkpoint has the shape of the model.
    """
    run, ledger = _run_and_ledger(folder)
    sources = saved_positions(folder.path)
    check_ledger(ledger, sources)
    check_nodes(folder.path, sources)
    for checkpoint in folder.checkpoints:
        round = checkpoint.state.round
        if checkpoint.state.params_P.shape != (run.model.layout.total,):
            raise CheckFailed(f"the checkpoint of round {round} belongs to another model than run.toml describes.")
    _needed(folder.checkpoints or None, "a whole checkpoint")
    rounds = ", ".join(str(checkpoint.state.round) for checkpoint in folder.checkpoints)
    yield f"of rounds {rounds}: all rounds before a checkpoint were charged before it was saved"


def _model(folder: Folder) -> Iterator[str]:
    """Check that the released model equals the checkpoint of its round, bit by bit."""
    run = _needed(folder.run, "run.toml")
    newest = _needed(folder.checkpoints or None, "a whole checkpoint")[-1].state
    params_P, round = released_model(folder.path.model, run.model)
    same = next((c.state for c in folder.checkpoints if c.state.round == round), None)
    if same is None:
        raise CheckFailed(
            f"model.safetensors is the model of round {round}, which has no checkpoint (newest: {newest.round})."
        )
    if not torch.equal(params_P, same.params_P):
        raise CheckFailed(f"model.safetensors is not the model of its round's checkpoint ({round}): it was replaced.")
    yield f"model.safetensors is the model of the checkpoint of round {round}, to the bit"
    if round < newest.round:
        yield f"the checkpoint of round {newest.round} is newer: the run was stopped between two writes; resume repairs it"


def _vocabulary(folder: Folder) -> Iterator[str]:
    """Check that the word list is the one that the ledger's header names, and that it has the size of the model."""
    run, ledger = _run_and_ledger(folder)
    words = Vocabulary.load(folder.path.vocabulary)
    if (ledger.facts.get("vocabulary") or {}).get("sha256") not in (None, words.digest):
        raise CheckFailed("vocabulary.txt is not the word list that the ledger names.")
    if len(words) != run.model.vocabulary_size:
        raise CheckFailed(f"vocabulary.txt has {len(words)} words, the model {run.model.vocabulary_size} rows.")
    yield "vocabulary.txt is the word list that the run began with"


def _metrics(folder: Folder) -> Iterator[str]:
    """Check that every line of metrics.jsonl is an evaluation of a charged round, and that no evaluation is missing.

    The file must begin with the evaluations whose digest the newest checkpoint has. A last line that a crash left
    incomplete is allowed.
    """
    run, ledger = _run_and_ledger(folder)
    reached = max((entry.round for entry in ledger.entries), default=-1) + 1
    reached = max(reached, _rounds_of_selection(run, ledger))
    lines = folder.path.metrics.read_bytes().split(b"\n") if folder.path.metrics.exists() else [b""]
    for number, line in enumerate(lines[:-1], start=1):  # After the last newline there is nothing, or a partial line.
        if not _is_evaluation(line):
            raise CheckFailed(f"metrics.jsonl, line {number} is not an evaluation: the file was damaged or changed.")
    rows = folder.path.read_metrics(check=False)  # The checks below have more precise messages.
    late = [row["round"] for row in rows if not 0 < int(row["round"]) <= reached]
    if late:
        raise CheckFailed(f"metrics.jsonl has an evaluation of round {late[0]}, which was never charged.")
    due = _rounds_to_evaluate(run, folder, rows)
    if folder.path.metrics.exists() and (missing := sorted(due - {int(row["round"]) for row in rows})):
        raise CheckFailed(
            f"metrics.jsonl lacks the evaluation of round {missing[0]}: it was shortened or replaced. Restore it from a "
            "copy, or delete it: neither the model nor the ledger needs it."
        )
    folder.path.check_metrics()
    known = folder.checkpoints[-1].metrics if folder.checkpoints else None
    yield f"{len(rows)} evaluations, all of rounds that were charged" if rows else "none"
    if rows:
        yield "their digest is not recorded" if known is None else "their digest is that of the newest checkpoint"


def _rounds_to_evaluate(run: Run, folder: Folder, rows: list[dict[str, Any]]) -> set[int]:
    """Return the rounds whose evaluations must be in metrics.jsonl.

    These are all evaluations up to the newest checkpoint, but not those before the first row of the file: the file may
    have been deleted, and a resumed run then begins a new file. The last evaluation before the checkpoint must always
    be there.
    """
    newest = max((checkpoint.state.round for checkpoint in folder.checkpoints), default=0)
    first = min((int(row["round"]) for row in rows), default=0)
    last = newest - newest % run.evaluation.every
    return {r for r in range(run.evaluation.every, last + 1, run.evaluation.every) if r >= first or r == last}


def _is_evaluation(line: bytes) -> bool:
    """Whether a line of metrics.jsonl has a round and the figures of an evaluation."""
    try:
        row = json.loads(line)
        numbers = [value for value in row.values() if value is not None]
        return (
            type(row["round"]) is int
            and all(type(value) in (int, float) for value in numbers)
            and all(0 <= row[f"accuracy_top{k}"] <= 1 for k in (1, 3, 5))
            and (row["epsilon"] is None or row["epsilon"] >= 0)
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def _tokens(folder: Folder, corpus: str | Path | None) -> Iterator[str]:
    """Check that tokens.json can be read, and that it names the tokenizer that the ledger's header names.

    If the run's store is on this machine, tokens.json must also agree with the store.
    """
    run, ledger = _run_and_ledger(folder)
    named = ledger.facts.get("tokens_sha256")  # Ledgers of older versions do not have it.
    if not folder.path.tokens.exists():
        if named not in (None, tokens_digest({})):
            raise CheckFailed("tokens.json is missing: copy it from the store.")
        yield "no tokens.json: text is split into words"
        return
    damaged = "tokens.json is damaged: copy it from the store."
    table = _read_json(folder.path.tokens, damaged)
    if not isinstance(table, dict):
        raise CheckFailed(damaged)
    if table:
        tokenizer_from_table(table)
    if named not in (None, tokens_digest(table)):
        raise CheckFailed("tokens.json names another tokenizer than the run began with: copy it from the store.")
    yield "tokens.json names a tokenizer"
    record = Path(corpus or run.corpus) / "corpus.json"
    if record.is_file():
        store = TokenStore.open(record.parent)
        if store.name == ledger.facts.get("corpus"):
            if table != store.info.get("tokens", {}):
                raise CheckFailed(f"tokens.json names another tokenizer than {store.path}: copy it from there.")
            yield "it is the tokenizer of the store"


def _measures(folder: Folder) -> Iterator[str]:
    """Check that measures.json is well-formed, and belongs to the released model.

    Measures of another model are not checked. It may be an older model of this run, whose digest nothing records.
    """
    if not folder.path.measures.exists():
        yield "none: the model was not measured in full"
        return
    remedy = "Delete it and run `unheard evaluate --full` again."
    content = _read_json(folder.path.measures, f"measures.json is not JSON. {remedy}")
    if not are_measures(content):
        raise CheckFailed(f"measures.json is damaged. {remedy}")
    if folder.path.read_measures() is None:
        raise CheckSkipped(
            "not checked: measures.json belongs to another model than model.safetensors, an older one of this run or one "
            "of another run (measure this one with `unheard evaluate --full`)"
        )
    yield "measures.json is well-formed, and belongs to the model in model.safetensors"


def _statement(folder: Folder) -> Iterator[str]:
    """Check that the saved statement equals the statement that is computed from the ledger now."""
    ledger = _needed(folder.ledger, "the ledger")
    if not folder.path.statement.exists():
        yield "there is none: the run is not finished, or was killed; `unheard statement` makes one from the ledger"
        return
    check_saved_statement(folder.path.statement, ledger.facts, ledger.entries)
    yield "statement.json equals the statement that is computed again from the ledger"


def _population(folder: Folder, corpus: str | Path | None) -> Iterator[str]:
    """Check that every charge of the run is in the ledger of the store's population. Skipped if that is not here."""
    run, ledger = _run_and_ledger(folder)
    path = ledger_path(corpus or run.corpus, run.ledger)
    sources = saved_positions(folder.path)
    if not path.is_file():
        if path.parent.is_dir() and any(source.population_position is not None for source in sources):
            raise CheckFailed(f"{path} is missing: what these users have spent was recorded there. Put it back.")
        raise CheckSkipped(f"not checked: the store's ledger is not at {path} (name the store with --corpus)")
    try:
        population = read_population_ledger(Path(corpus or run.corpus), path)
    except UnheardError as error:
        raise CheckFailed(f"the store's ledger cannot be trusted: {error}") from None
    charged_run = population.runs.get(run_id(ledger))
    if charged_run is None:
        raise CheckFailed(f"{population.path} does not list this run: the store's users were not charged for it there.")
    if charged_run.num_charged < len(ledger):
        raise CheckFailed(
            f"{population.path} has {charged_run.num_charged} of this run's {len(ledger)} charges: it was shortened or replaced."
        )
    check_population(population, run_id(ledger), len(ledger), sources)
    known, stated = charged_run.facts.get("declared"), ledger.facts.get("declared")
    # DP: the declaration was recorded with these users before the first round, so a change in only one of the two
    # ledgers is detected.
    if known is not None and known != stated and not charged_run.has_repeats:
        raise CheckFailed(
            f"{population.path} and the run's ledger state different declarations (rounds, noise, budget) for this run."
        )
    others = "" if len(population.runs) == 1 else f", among those of {len(population.runs)} runs"
    yield f"all charges of this run are in the store's ledger too{others}"


def _store(folder: Folder, corpus: str | Path | None) -> Iterator[str]:
    """Check that the store is the one that the ledger names, and that none of its files was changed."""
    run, ledger = _run_and_ledger(folder)
    path = Path(corpus or run.corpus)
    if not (path / "corpus.json").is_file():
        if (path / "digests.json").exists():
            raise CheckFailed(f"{path / 'corpus.json'} is missing, but other files of the store exist: put it back.")
        raise CheckSkipped(f"not checked: there is no store at {path} (name it with --corpus)")
    store = TokenStore.open(path)
    if ledger.facts.get("corpus") not in (None, store.name):
        raise CheckFailed(f"{path} is not the store that the ledger names.")
    checked = store.check_files()
    if checked is None:
        raise CheckSkipped(f"not checked: {path} was written by a version that recorded no digests")
    yield f"{checked} files of the store, every byte as it was written"


def _epsilon(folder: Folder) -> Iterator[str]:
    """Compute epsilon again from the events of the ledger. Fails if the ledger has no valid delta."""
    ledger = _needed(folder.ledger, "the ledger")
    delta = ledger.facts.get("delta")
    if not isinstance(delta, float) or not 0 < delta < 1:
        raise CheckFailed("the ledger declares no delta between 0 and 1.")
    claim = claim_of_run(ledger.facts, ledger.entries, delta)
    yield f"{claim.epsilon:.6g} at delta {delta:.3g} by {claim.accountant}, recomputed from the ledger"


def _rounds_of_selection(run: Run, ledger: Ledger) -> int:
    """Return how many rounds one charge covers if the run is the best of several (`unheard tune --select`); else 0.

    Raises:
        CheckFailed: The run was selected, and its charge is not that of a selection with the run's q and z.
    """
    if not ledger.facts.get("selection"):
        return 0
    index = _charges_before_training(ledger) - 1
    charged = ledger.entries[index].event if 0 <= index < len(ledger) else None
    event = run.plan.at(0, run.model.layout).event()
    q_and_z = (event.sampling_prob, event.noise_multiplier) if isinstance(event, PoissonGaussian) else None
    if not isinstance(charged, Selection) or q_and_z != (charged.sampling_prob, charged.noise_multiplier):
        raise CheckFailed(
            "the run was selected among several, but it was not charged for a selection with the q and z of the run file."
        )
    return charged.rounds


def _charges_before_training(ledger: Ledger) -> int:
    """Return the number of charges for the vocabulary and for the run that this one started from.

    Ledgers of older versions do not state the number. For these it is inferred from the kinds of the first events.
    """
    stated = (ledger.facts.get("start") or {}).get("charges")
    if isinstance(stated, int):
        return stated
    kinds = (Gaussian, FailureProbability)
    return next((i for i, entry in enumerate(ledger.entries) if not isinstance(entry.event, kinds)), len(ledger))


def _run_and_ledger(folder: Folder) -> tuple[Run, Ledger]:
    """Return the run and the ledger. Raise `CheckSkipped` if one of them could not be read."""
    return _needed(folder.run, "run.toml"), _needed(folder.ledger, "the ledger")


def _read_json(path: Path, otherwise: str) -> Any:
    """Return the value in a JSON file. Raise `CheckFailed` with the message `otherwise` if it is not JSON."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except ValueError:
        raise CheckFailed(otherwise) from None


def _needed(value: Any, what: str) -> Any:
    """Return a value that a check needs. Raise `CheckSkipped` if it is None, because `what` could not be read."""
    if value is None:
        raise CheckSkipped(f"not checked: it needs {what}, which could not be read or does not agree with other files")
    return value
