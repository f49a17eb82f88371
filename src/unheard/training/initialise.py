"""Checks a run, and creates its run folder or restores an existing one, before the first round.

    check_permission(run, allow_no_privacy)                             # does it add noise?
    engine = build_engine(engine_choice, run.model, ranks)              # on this process, or on several
    prepared = create_run(run, "runs/first", engine_choice, engine)     # a new run
    prepared = reopen_run(run, RunFolder.open("runs/first"), engine)    # an existing one
    ledger = reopen_ledgers(run, folder, store)                         # charged further by its rounds
    state = restore_state(run, folder, engine.device)                   # where its rounds continue

Input: a `Run` and its store. Output: a run folder whose ledger holds what these users have spent already (their
vocabulary, and the run that this one starts from), and the first `State`. Before anything is charged or created,
`check_run` and `check_engine` raise an error that names the rule and the remedy if the run does not fit its corpus, its
model or its engine. Combinations of parts without a privacy proof are refused earlier, when the `Plan` is built
(mechanism/plan.py).
"""

import hashlib
import json
import logging
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from unheard.corpus.store import TokenStore, UserTokens, tokens_digest
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed.engine import DistributedEngine
from unheard.engines.distributed.parallel_map import ParallelMap, map_on_ranks, sequential_map
from unheard.engines.distributed.process_group import ProcessGroup
from unheard.engines.engine import Engine
from unheard.errors import (
    CheckpointCorrupt,
    CorpusError,
    InvalidValue,
    LedgerError,
    ModelError,
    PrivacyError,
    UnprovenCombination,
)
from unheard.mechanism.noise import DistributedGaussianNoise, NoNoise
from unheard.mechanism.plan import Plan
from unheard.models.model import LanguageModel
from unheard.privacy.accountants import versions
from unheard.privacy.budget import EARLIER_RUN, declaration
from unheard.privacy.events import from_record, to_record
from unheard.privacy.ledger import Ledger, new_run_id, run_id
from unheard.privacy.planner import NoiseLevel
from unheard.privacy.population_ledger import PopulationLedger, open_population_ledger
from unheard.privacy.run_ledger import (
    JointLedger,
    check_ledger,
    check_nodes,
    check_population,
    read_run_ledger,
    remembered,
)
from unheard.randomness import ReproducibleStreams, SecureStreams, Streams
from unheard.run_folder import RunFolder, replace_file
from unheard.training.checkpoint import load_model, newest_checkpoint, parameters_digest, restore_model, save_checkpoint
from unheard.training.round import State
from unheard.training.run import Run, hint_for_older_run, run_hash, run_toml
from unheard.training.worker import build_on_ranks


def check_permission(run: Run, allow_no_privacy: bool) -> None:
    """Check that a run adds noise, or that the caller has allowed a run that does not.

    Args:
        run: The run as configured.
        allow_no_privacy: Whether the caller allows a run without noise.

    Raises:
        PrivacyError: The run adds no noise and `allow_no_privacy` is False.
    """
    # DP: the first round without noise makes the epsilon of these users infinite over all runs, and nothing undoes it.
    if isinstance(run.plan.noise, NoNoise) and not allow_no_privacy:
        raise PrivacyError(
            "This run adds no noise. Its first round makes epsilon infinite, permanently and over all runs, for the users of "
            f"{run.corpus}. Add noise ([noise] kind = 'gaussian'); or, if the text is public or its users agreed, allow it: "
            "allow_no_privacy=True in Python, --yes on the command line."
        )


def noise_level(run: Run) -> NoiseLevel | None:
    """Return how large the noise of a round is beside an update, in the phase where it is largest.

    Args:
        run: A run whose model is pinned.

    Returns:
        The level; None for a run without noise.
    """
    if isinstance(run.plan.noise, NoNoise):
        return None
    layout = run.model.layout
    levels = [
        NoiseLevel(
            noise_std=plan.noise.std(plan.sensitivity), clip_norm=plan.contribution.l2_bound, parameters=layout.total
        )
        for _, plan in run.plan.phases(layout)
    ]
    return max(levels, key=lambda level: level.ratio)


def pinned(run: Run) -> Run:
    """The run with its model pinned: its hash then covers the vocabulary size and the digest of pre-trained weights."""
    words = len(TokenStore.open(run.corpus).vocabulary) if run.model.vocabulary_size is None else None
    return replace(run, model=run.model.pinned(words))


def build_engine(choice: EngineChoice, model: LanguageModel, ranks: ProcessGroup | None = None) -> Engine:
    """Build the engine for one model, on this process alone or on all ranks.

    Args:
        choice: The kind of engine and the device. On several ranks each takes a GPU of its own.
        model: The model whose updates the engine sums.
        ranks: The processes that share the work (training/worker.py); None for this process alone.

    Raises:
        InvalidValue: The engine, the device or `corpus_part` cannot be used here.
        RankError: A rank does not answer.
    """
    if ranks is not None:
        return build_on_ranks(choice, model, ranks)
    if choice.corpus_part is not None:
        raise InvalidValue(
            f"engine.corpus_part = '{choice.corpus_part}' is where each of several processes has its part of the "
            "store, and this process is alone: it reads the whole store, at corpus.path. Start as many as hold all "
            "parts together (torchrun, --processes), or take corpus_part out of [engine]; to resume alone, name the "
            "whole store with --corpus."
        )
    return choice.build(model)


def parallel_map_of(engine: Engine) -> ParallelMap:
    """How evaluation distributes its batches: over the ranks of a distributed engine, else one after the other."""
    return map_on_ranks(engine.ranks) if isinstance(engine, DistributedEngine) else sequential_map


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run whose folder exists and whose configuration was checked, ready for the training loop."""

    run: Run
    folder: RunFolder
    store: TokenStore
    users: UserTokens
    may_renew_noise: bool = False
    """Whether correlated noise that has no attempts left is followed by a new mechanism: more rounds were asked for."""


def create_run(run: Run, out: str | Path, choice: EngineChoice, engine: Engine) -> PreparedRun:
    """Check a run, create its folder with run file, ledger and first checkpoint, and register it with its population.

    Args:
        run: The run as configured.
        out: The folder to create.
        choice: The choice of engine, written to the run file.
        engine: The engine that will train, asked whether it can read every user.

    Raises:
        UnheardError: The run cannot be trained as configured; nothing was created (`check_run`, `check_engine`,
            `RunFolder.begin`).
    """
    store = TokenStore.open(run.corpus)
    run = replace(run, corpus=Path(run.corpus).resolve(), ledger=run.ledger and Path(run.ledger).resolve())
    check_run(run, store, training_users(engine, store))
    check_engine(engine, store, run.plan)
    state = first_state(run)
    population = population_ledger_of(run, store)
    check_public_start(run, population, state)
    folder = RunFolder.begin(out)
    replace_file(folder.run_file, run_toml(run, choice).encode())
    replace_file(folder.vocabulary, (store.path / "vocabulary.txt").read_bytes())
    replace_file(folder.tokens, json.dumps(store.info.get("tokens", {}), indent=2).encode())
    ledger = Ledger.create(folder.ledger, ledger_header(run, store, state))
    if isinstance(engine, EngineWithUsers):
        # Beside the ledger: with it the files of the models are those of a run on this machine, to the byte.
        replace_file(folder.federated, json.dumps(engine.facts).encode())
    charge_earlier_costs(run, store, ledger)
    JointLedger.begin(ledger, population, Path(out).name, parent_ledger(run), store=store.content_digest)
    joint = JointLedger(ledger, population)
    save_checkpoint(folder, run.model, state, joint, run.training.keep_checkpoints)
    # DP: the folder appears with what was already spent in its ledger, and with the model that it begins from, or not
    # at all.
    return PreparedRun(run=run, folder=folder.publish(out), store=store, users=training_users(engine, store))


def reopen_run(run: Run, folder: RunFolder, engine: Engine) -> PreparedRun:
    """Check that a run folder belongs to a run and its corpus, so that the run can continue.

    Args:
        run: The run as configured in the folder's run file, perhaps with more rounds.
        folder: The run folder.
        engine: The engine that will train.

    Raises:
        LedgerError: The folder's ledger is for another configuration or another corpus.
        UnheardError: As in `create_run`.
    """
    store = TokenStore.open(run.corpus)
    check_run(run, store, training_users(engine, store))
    facts = Ledger.read(folder.ledger).facts
    if facts.get("run_hash") != run_hash(run):
        hint = hint_for_older_run(run, str(facts.get("run_hash")))
        raise LedgerError(
            f"{folder.run_file} was changed after the run began: its ledger is for another configuration. Put it back "
            f"(rounds may change), or begin a new run in another folder.{hint}"
        )
    if facts.get("corpus") != store.name:
        raise LedgerError(f"{run.corpus} is not the corpus that this run began with. Name the right one with --corpus.")
    check_engine(engine, store, run.plan)
    return PreparedRun(run=run, folder=folder, store=store, users=training_users(engine, store))


def check_run(run: Run, store: TokenStore, users: UserTokens | None = None) -> None:
    """Check everything that would otherwise fail during training.

    Args:
        run: The run as configured.
        store: Its store.
        users: The users to train on; None for those of the store. The nodes of a federated run check their own users.

    Raises:
        ModelError: The model does not fit the vocabulary or the user features, or keeps a state between calls.
        CorpusError: The store has no training users or no held-out users, or its boundaries are damaged.
        UnprovenCombination: A round of the schedule has no privacy event, or the model's weights are of unknown origin.
    """
    run.model.check_store(
        store.info.get("tokens", {}),
        store.vocabulary,
        unrolls={"update.unroll": run.plan.update.unroll, "evaluation.unroll": run.evaluation.unroll},
        is_private=not isinstance(run.plan.noise, NoNoise),
    )
    users = store.train if users is None else users
    if not users.num_users or not store.held_out.num_users:
        raise CorpusError(
            f"{store.path} needs users to train on and others held out. Prepare it with a larger --held-out, or more "
            "users."
        )
    if users.num_users > run.plan.population:
        # One bit about the store, for its owner, who sees this message; the number itself is never printed.
        logging.getLogger("unheard").warning(
            "The declared population (privacy.population = %d) is smaller than the number of users in %s. The guarantee "
            "holds, since the declared q is the one that users are drawn with; but more users than users_per_round take "
            "part in a round, and each round costs more than it needs to. Declare a public number that is at least as "
            "large as the number of users.",
            run.plan.population,
            store.path,
        )
    for split in (store.train, store.held_out) if users is store.train else (store.held_out,):
        split.check_boundaries()
        if run.model.user_features and split.num_features != run.model.user_features:
            raise ModelError(
                f"The model takes {run.model.user_features} features of each user, the corpus has "
                f"{split.num_features}. Set model.user_features = {split.num_features}."
            )
    check_is_pure(run.model)
    for _, plan in run.plan.phases(run.model.layout):
        plan.event()


def check_is_pure(model: LanguageModel) -> None:
    """Raise `ModelError` if the model draws random numbers (active dropout) or keeps a state between calls."""
    params = model.layout.split(model.initial(0))
    features_F = torch.zeros(model.user_features) if model.user_features else None
    first_14, second_14 = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[3, 3, 2, 1]])
    before = model.logits(params, first_14, features_F).clone()
    model.logits(params, second_14, features_F)
    # DP: what one user adds must be a function of the parameters and their own text, not of who came before them.
    if not torch.equal(before, model.logits(params, first_14, features_F)):
        raise ModelError(
            "The model gives different scores for the same words: it draws random numbers, or keeps something from "
            "call to call, which would carry one user's text into another's update. Make it a function of parameters "
            "and tokens alone."
        )


@runtime_checkable
class EngineWithUsers(Protocol):
    """An engine whose users are not in the store of this machine: their text stays on the nodes of a federated run."""

    @property
    def users(self) -> UserTokens:
        """The registered users, numbered from 0. Their text cannot be read."""
        ...

    def check_plan(self, plan: Plan) -> None:
        """Raise `UnheardError` if the nodes cannot run the plan as it was declared."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """What the header of a run's ledger states about the nodes: whom a reader of the statement must trust."""
        ...


def training_users(engine: Engine, store: TokenStore) -> UserTokens:
    """The users that a round draws from: those of the nodes for a federated engine, else those of the store."""
    return engine.users if isinstance(engine, EngineWithUsers) else store.train


def check_engine(engine: Engine, store: TokenStore, plan: Plan) -> None:
    """Check, before anything is charged, that the engine can reach every user and that the declared noise is added.

    Args:
        engine: The engine that will train.
        store: The store of the run.
        plan: The plan of the run.

    Raises:
        CorpusError: As `check_all_users_reachable`.
        PrivacyError: The nodes are to add the noise, and the engine has no nodes.
    """
    if isinstance(engine, EngineWithUsers):
        return engine.check_plan(plan)
    if isinstance(plan.noise, DistributedGaussianNoise):
        raise PrivacyError(
            "[noise] kind = 'distributed_gaussian' is added by the nodes of a federated run. Train with --on flower and "
            "[engine] secure_aggregation = true, or set [noise] kind = 'gaussian'."
        )
    return check_all_users_reachable(engine, store)


def check_all_users_reachable(engine: Engine, store: TokenStore) -> None:
    """Check, before anything is charged, that this process or a rank can read the text of every training user.

    Raises:
        CorpusError: Some users' text is on no rank, or a rank has another corpus.
    """
    if isinstance(engine, DistributedEngine):
        engine.check_replicas(store)
    elif not store.train.shards_here.all():
        raise CorpusError(
            f"{store.path} is a part of a store: some of its users' text lies elsewhere. Train on ranks that hold all "
            "parts together (torchrun), or give the whole store."
        )


def first_state(run: Run) -> State:
    """The state before round 0: the model initialised from `init_seed`, or the model at `init_from`.

    Raises:
        InvalidValue: `init_from` is neither a run folder nor a model file.
        UnprovenCombination: A private run starts from a model file whose cost nobody knows, or a run with a budget from
            an earlier run.
        CheckpointCorrupt: The model cannot be read.
    """
    if run.training.init_from is None:
        return State(round=0, params_P=run.model.initial(run.training.init_seed))
    path = Path(run.training.init_from)
    is_folder = path.is_dir()
    if not (is_folder or path.is_file()):
        raise InvalidValue(f"training.init_from = {str(path)!r} is neither a run folder nor a model file.")
    is_private = not isinstance(run.plan.noise, NoNoise)
    if is_private and not is_folder and not run.training.init_is_public:
        # DP: a model of unknown origin may have seen these users without noise.
        raise UnprovenCombination(
            f"{path} is a model without a ledger: nobody can say what it cost these users. Give its run folder, or, "
            "if none of them had a part in it, set training.init_is_public = true."
        )
    if is_folder and run.budget is not None and not run.training.init_is_public:
        # DP: the budget was declared after results of the earlier run, so keeping it proves nothing about both runs.
        raise UnprovenCombination(
            f"[privacy] budget_epsilon with training.init_from = {str(path)!r}: the budget would have to cover the earlier "
            "run, which was there before it. Remove budget_epsilon, and set a budget of all runs before the first of them: "
            "unheard budget STORE --epsilon E."
        )
    return State(round=0, params_P=load_model(RunFolder(path).model if is_folder else path, run.model))


def population_ledger_of(run: Run, store: TokenStore, *, must_exist: bool = False) -> PopulationLedger:
    """Open the ledger to which all runs on the store's users are charged; `LedgerError` if it cannot be written."""
    return open_population_ledger(store.path, store.name, store.vocabulary_events, run.ledger, must_exist=must_exist)


def check_public_start(run: Run, population: PopulationLedger, first: State) -> None:
    """Raise `UnprovenCombination` if a model that was trained on this population is declared public.

    Args:
        run: The run as configured.
        population: The ledger of the run's users.
        first: The state before round 0, with the model that the run starts from.
    """
    start, of_run = run.training.init_from, None
    if start is not None and run.training.init_is_public:
        path = Path(start).resolve()  # a run folder, its model file or one of its checkpoints
        folders = [RunFolder(path)] if path.is_dir() else [RunFolder(folder) for folder in path.parents[:2]]
        folder = next((f for f in folders if f.run_file.is_file() and f.ledger.is_file()), None)
        of_run = None if folder is None else run_id(Ledger.read(folder.ledger))
    elif start is not None or run.model.origin() is None:
        return
    # DP: a run that these very users are charged for left no public model, whatever is declared.
    # DP: a model is known by the digest of its parameters, and a merged one by that of its files, wherever they lie.
    digests = {parameters_digest(first.params_P), run.model.weights_digest()}
    if of_run in population.members or not digests.isdisjoint(population.released):
        raise UnprovenCombination(
            f"{start or 'The model'} was trained on these same users (their ledger, {population.path}, holds it): it is "
            "not public for them. Name its run folder in training.init_from, without training.init_is_public: what "
            "that run cost is then part of this one's."
        )


def charge_earlier_costs(run: Run, store: TokenStore, ledger: Ledger) -> None:
    """Charge what these users spent before the first round: their vocabulary, and the run that this one starts from.

    Args:
        run: The run as configured.
        store: Its store, which names what its vocabulary has cost.
        ledger: The new ledger of the run.
    """
    # DP: a vocabulary found in the users' own text is paid for in this ledger too.
    for record in store.vocabulary_events:
        ledger.charge(from_record(record), 0)
    parent = parent_ledger(run)
    if parent is not None:
        # DP: the earlier run had the same users, unless declared otherwise; its cost is part of this model's.
        ledger.charge_all(parent.events, 0)


def parent_ledger(run: Run) -> Ledger | None:
    """The ledger of the run folder in `init_from`, or None if there is none or it is declared public.

    Raises:
        LedgerError: The ledger does not hold what the parent's model cost.
    """
    if run.training.init_from is None or not Path(run.training.init_from).is_dir() or run.training.init_is_public:
        return None
    return read_run_ledger(run.training.init_from)


def ledger_header(run: Run, store: TokenStore, first: State) -> dict[str, Any]:
    """The public facts with which a run's ledger begins: declared numbers, resolved, and versions.

    No fact is a count of private users. A new fact needs the same question: does it depend on the users?

    Args:
        run: The run as configured.
        store: Its store.
        first: The state before round 0.
    """
    vocabulary = {key: value for key, value in store.info.get("vocabulary", {}).items() if key != "events"}
    configuration = run_hash(run)
    earlier_charges = len(store.vocabulary_events) + len(parent_ledger(run) or ())
    return {
        **run.plan.facts(run.model.layout),
        **({"correlated_noise": correlated} if (correlated := run.plan.correlated_facts()) else {}),
        "delta": run.claimed_delta,
        "randomness": described_randomness(run),
        "vocabulary": vocabulary,
        "tokens_sha256": tokens_digest(store.info.get("tokens", {})),
        "drop_duplicates": bool(store.info.get("drop_duplicates")),
        "start": {
            **_start(run),
            **_base(run),
            "charges": earlier_charges,
            "sha256": parameters_digest(first.params_P),
        },
        "parameters": run.model.layout.total,
        # DP: what the run may become is on record before anybody can have seen a result of it.
        "declared": declaration(
            run.training.rounds,
            [(first, to_record(plan.event())) for first, plan in run.plan.phases(run.model.layout)],
            run.budget,
        ),
        "corpus": store.name,
        "software": {**versions(), "torch": str(torch.__version__), **source_commit()},
        "run_hash": configuration,
        "run_id": new_run_id(None if run.training.reproducible_seed is None else configuration),
    }


@cache
def source_commit() -> dict[str, str]:
    """The commit of this package, with `-dirty` if files were changed; nothing if it does not run from a repository."""
    here = ["git", "-C", str(Path(__file__).parent)]
    try:
        # A package that is installed inside another project's repository is not part of it.
        subprocess.run([*here, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        name = subprocess.run(
            [*here, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {"commit": name}


def described_randomness(run: Run) -> dict[str, str]:
    """The randomness of a new run, as its ledger's header states it. The seed is not part of it."""
    seed, shared = run.training.reproducible_seed, run.training.shared_cohorts
    if seed is None:
        return SecureStreams().describe()
    return ReproducibleStreams(seed=seed, scope="", shared_cohorts=shared).describe()


def _base(run: Run) -> dict[str, Any]:
    """The declared origin of a pre-trained model's weights.

    It is stated whatever `init_from` says, since frozen weights stay.
    """
    origin = run.model.origin()
    if origin is None:
        return {}
    digest = run.model.weights_digest()
    return {"base": origin} if digest is None else {"base": origin, "base_sha256": digest}


def _start(run: Run) -> dict[str, Any]:
    """The origin of the first model, and what a statement must say about it."""
    if run.training.init_from is None:
        return {"from": f"seed {run.training.init_seed}" if run.model.origin() is None else "its base"}
    if run.training.init_is_public:
        return {"from": "a model declared public"}
    parent = Path(run.training.init_from)
    if not parent.is_dir():
        return {"from": "a model file of unknown cost"}
    return {"from": EARLIER_RUN, **_inherited(Ledger.read(RunFolder(parent).ledger).facts)}


def _inherited(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a statement must say about an earlier run and those that it started from: their noise is in this model."""
    before = facts.get("start") or {}
    runs = (before, facts)
    seeded = [r["randomness"] for r in runs if (r.get("randomness") or {}).get("mode") == "reproducible"]
    # DP: noise of a known seed hides nothing, however many runs ago it was added.
    kept = {"randomness": seeded[0] if seeded else facts.get("randomness")}
    kept["drop_duplicates"] = any(r.get("drop_duplicates") for r in runs)
    public = "a model declared public"
    return {**kept, "base": public} if public in (before.get("from"), before.get("base")) else kept


def reopen_ledgers(run: Run, folder: RunFolder, store: TokenStore) -> JointLedger:
    """Open the ledgers of an existing run in order to charge them, if they hold everything that was charged before.

    Args:
        run: The run as configured.
        folder: Its folder, locked.
        store: Its store.

    Raises:
        LedgerError: The run's or the population's ledger is missing, or was shortened, replaced or rolled back.
        CheckpointCorrupt: A checkpoint cannot be read.
    """
    sources = remembered(folder)
    ledger = Ledger.open(folder.ledger)
    check_ledger(ledger, sources)
    check_nodes(folder, sources)
    # DP: a population's ledger that a checkpoint remembers must be there; a new one would have forgotten its charges.
    is_known = any(source.population_position is not None for source in sources)
    population = population_ledger_of(run, store, must_exist=is_known)
    check_population(population, run_id(ledger), len(ledger), sources)
    member = population.members.get(run_id(ledger))
    # DP: the charges are those of the users that the run began with; others would take part in it uncharged.
    if member and not member.has_repeats and member.facts.get("store") not in (None, store.content_digest):
        raise LedgerError(
            f"{store.path} was prepared like the store that this run began with, but holds other text. Put the right store "
            "back, or name it with --corpus; for the new text, begin a new run."
        )
    return JointLedger(ledger, population)


def restore_state(run: Run, folder: RunFolder, device: torch.device) -> State:
    """The state of the newest checkpoint, on a device. A released model that is missing or older is written again.

    Args:
        run: The run as configured.
        folder: Its folder.
        device: Where the engine computes.

    Raises:
        CheckpointCorrupt: The checkpoint cannot be read, or belongs to another model.
    """
    checkpoint = newest_checkpoint(folder)
    if checkpoint.state.params_P.shape != (run.model.layout.total,):
        raise CheckpointCorrupt(
            f"The newest checkpoint is not of this run's model, which has {run.model.layout.total} parameters. "
            "Delete it to resume from the one before."
        )
    restore_model(folder, run.model, checkpoint)
    state = checkpoint.state
    # Scalars of the server's memory (Adam's number of steps) stay on the CPU, where they are read.
    memory = {name: t.to(device) if t.ndim else t for name, t in state.server_memory.items()}
    return replace(state, params_P=state.params_P.to(device), server_memory=memory)


def streams_of(run: Run, facts: Mapping[str, Any], text: str) -> Streams:
    """The sources of randomness of a run: secure, or reproducible if the run has a `reproducible_seed`.

    Args:
        run: The run as configured.
        facts: The header of its ledger. A seeded run of a version before 0.2.0 continues with the streams of its seed
            alone.
        text: The digest of the users' text (`TokenStore.content_digest`). It decides the streams and is kept nowhere.
    """
    seed = run.training.reproducible_seed
    # DP: secure unless a seed is asked for by name.
    if seed is None:
        return SecureStreams()
    if "streams" not in (facts.get("randomness") or {}):
        return ReproducibleStreams(seed=seed)
    # DP: the settings, the store and the first model: a run that differs in one of them has noise of its own.
    parts = [facts.get("run_hash"), facts.get("corpus"), (facts.get("start") or {}).get("sha256")]
    if not all(isinstance(part, str) for part in parts):
        raise LedgerError(
            "The ledger's first line does not name the settings, the store and the first model of a seeded run: its "
            "noise cannot be drawn again. Put the right ledger back, or begin a new run."
        )
    # DP: stores that were prepared in the same way have one name; runs on them must not share noise either.
    scope = hashlib.sha256("\n".join(map(str, [*parts, text])).encode()).hexdigest()
    return ReproducibleStreams(seed=seed, scope=scope, shared_cohorts=run.training.shared_cohorts)
