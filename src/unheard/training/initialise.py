"""Checks a run, and creates its run folder or reopens an existing one, before the first round.

    check_permission(run, allow_no_privacy)                             # raises if the run adds no noise
    engine = build_engine(engine_choice, run.model, ranks)              # on this process, or on several
    prepared = create_run(run, "runs/first", engine_choice, engine)     # a new run
    prepared = reopen_run(run, RunFolder.open("runs/first"), engine)    # an existing one
    ledger = reopen_ledgers(run, folder, store)                         # to charge the next rounds
    state = restore_state(run, folder, engine.device)                   # the state of the newest checkpoint

Input: a `Run` and its store. Output: a run folder and the first `State`. The folder's ledger holds the earlier charges
of these users: those of a private vocabulary and of the run that this run starts from. Before anything is charged or
created, `check_run` and `check_engine` raise an error if the run does not fit its store, its model or its engine.
Combinations of parts without a privacy proof raise an error earlier, when the `Plan` is built (mechanism/plan.py).
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
from unheard.models.model import LanguageModel, unknown_features
from unheard.privacy.accountants import versions
from unheard.privacy.budget import EARLIER_RUN, PUBLIC_START, UNKNOWN_START, Budget, declaration, rounds_within
from unheard.privacy.events import Event, NoiseLevel, from_record, to_record
from unheard.privacy.ledger import Ledger, new_run_id, run_id
from unheard.privacy.population_ledger import PopulationLedger, known_ledgers, known_position, open_population_ledger
from unheard.privacy.run_ledger import (
    JointLedger,
    check_ledger,
    check_nodes,
    check_population,
    earlier_models,
    read_run_ledger,
    saved_positions,
)
from unheard.privacy.saved_statement import check_saved_statement
from unheard.randomness import ReproducibleStreams, SecureStreams, Streams
from unheard.run_folder import RunFolder, read_facts, replace_file
from unheard.training.checkpoint import (
    load_model,
    newest_checkpoint,
    parameters_digest,
    read_words,
    restore_model,
    save_checkpoint,
)
from unheard.training.round import State
from unheard.training.run import Run, hint_for_older_run, run_hash, run_toml
from unheard.training.worker import build_on_ranks

FEW_USERS = 3
"""A warning is logged if the declared population is more than this many times the number of users."""


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
    """Return the size of a round's noise in proportion to the clip norm, for the phase in which it is largest.

    Args:
        run: A run whose model is pinned (`pinned`), so that its number of parameters is known.

    Returns:
        The noise level; None for a run without noise.
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
    """Return the run with its model pinned, so that the run's hash covers everything that the model depends on.

    The model gets the vocabulary size of the store, if it names none, and the digest of pre-trained weights.
    """
    words = len(TokenStore.open(run.corpus).vocabulary) if run.model.vocabulary_size is None else None
    return replace(run, model=run.model.pinned(words))


def with_absolute_paths(run: Run) -> Run:
    """Return the run with the absolute paths of its store and its ledger."""
    return replace(run, corpus=Path(run.corpus).resolve(), ledger=run.ledger and Path(run.ledger).resolve())


def build_engine(choice: EngineChoice, model: LanguageModel, ranks: ProcessGroup | None = None) -> Engine:
    """Build the engine for one model, on this process alone or on all ranks.

    Args:
        choice: The kind of engine and the device. With several ranks on GPUs, each rank uses a different GPU.
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
            f"engine.corpus_part = '{choice.corpus_part}' is the path where each of several processes has its part of "
            "the store, and this process is alone: it reads the whole store, at corpus.path. Start as many processes "
            "as there are parts (torchrun, --processes), or remove corpus_part from [engine]; to resume alone, name "
            "the whole store with --corpus."
        )
    return choice.build(model)


def parallel_map_of(engine: Engine) -> ParallelMap:
    """Return the map over batches for evaluation: over the ranks of a distributed engine, otherwise on this process."""
    return map_on_ranks(engine.ranks) if isinstance(engine, DistributedEngine) else sequential_map


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run whose folder exists and whose configuration was checked, ready for the training loop."""

    run: Run
    folder: RunFolder
    store: TokenStore
    users: UserTokens
    may_renew_noise: bool = False
    """Whether a new mechanism may begin when correlated noise has no attempts left; set if `resume` is given `rounds`."""
    has_new_noise: bool = False
    """Whether a new mechanism of correlated noise begins in any case; set if `resume` is given `new_noise`."""


def create_run(run: Run, out: str | Path, choice: EngineChoice, engine: Engine) -> PreparedRun:
    """Check a run, create its folder with run file, ledger and first checkpoint, and register it with its population.

    Args:
        run: The run as configured.
        out: The folder to create.
        choice: The choice of engine, written to the run file.
        engine: The engine that will train. It must be able to read the text of every user.

    Raises:
        UnheardError: The run cannot be trained as configured (`check_run`, `check_engine`, `check_public_start`,
            `RunFolder.begin`). No run folder was created.
    """
    store = TokenStore.open(run.corpus)
    run = with_absolute_paths(run)
    check_run(run, store, training_users(engine, store))
    check_engine(engine, store, run.plan)
    state = first_state(run)
    population = population_ledger_of(run, store)
    check_public_start(run, population, state)
    for sentence in budget_cautions(run, store, population):
        logging.getLogger("unheard").warning(sentence)
    folder = RunFolder.begin(out)
    replace_file(folder.run_file, run_toml(run, choice).encode())
    replace_file(folder.vocabulary, (store.path / "vocabulary.txt").read_bytes())
    replace_file(folder.tokens, json.dumps(store.info.get("tokens", {}), indent=2).encode())
    ledger = Ledger.create(folder.ledger, ledger_header(run, store, state, population))
    if (nodes := nodes_record(engine)) is not None:
        # In a file of its own, not in the ledger's header: model files contain the ledger's hash, and they should equal
        # those of the same run on one machine, byte by byte.
        replace_file(folder.federated, nodes)
    charge_earlier_costs(run, store, ledger)
    JointLedger.register(ledger, population, Path(out).name, parent_ledger(run), store=store.content_digest)
    joint = JointLedger(ledger, population)
    save_checkpoint(folder, run.model, state, joint, run.training.keep_checkpoints)
    # DP: the folder appears with what was already spent in its ledger, and with the model that it begins from, or not
    # at all.
    return PreparedRun(run=run, folder=folder.publish(out), store=store, users=training_users(engine, store))


def budget_cautions(run: Run, store: TokenStore, population: PopulationLedger) -> list[str]:
    """Return a sentence for each budget that will stop the run before its last declared round.

    A budget is checked before every round, so it is kept by an accountant that is fast and, for several runs, proved for
    rounds that are chosen after results. The bound of that accountant is larger than the epsilon of a plan or a statement.
    A run that is planned for the epsilon of its budget therefore stops early.

    Args:
        run: A run whose model is pinned (`pinned`).
        store: The store of the run.
        population: The ledger of the run's users, which may have a budget of all runs.
    """
    vocabulary = [from_record(record) for record in store.vocabulary_events]
    budgets: list[tuple[str, Budget | None, list[Event]]] = [
        ("this run (privacy.budget_epsilon)", run.budget, vocabulary),
        ("all runs on these users (unheard budget)", population.budget, population.events),
    ]
    sentences = []
    for whose, budget, before in budgets:
        if budget is None or (allowed := rounds_within(budget, before, declared_rounds(run))) >= run.training.rounds:
            continue
        allows = f"{allowed:,} of the {run.training.rounds:,} declared rounds: training will stop there"
        sentences.append(
            f"The budget of {whose}, epsilon {budget.epsilon:g} at delta {budget.delta:g}, allows "
            f"{allows if allowed else 'no round of this run'}. The budget is kept by "
            f"{budget.accountant.upper()}, whose bound is larger than the epsilon that `unheard plan` shows. For all "
            "rounds, add more noise, declare fewer rounds, or declare a larger budget."
        )
    return sentences


def reopen_run(run: Run, folder: RunFolder, engine: Engine) -> PreparedRun:
    """Check that a run folder belongs to a run and its corpus, so that the run can continue.

    Args:
        run: The run as configured in the folder's run file, perhaps with more rounds.
        folder: The run folder.
        engine: The engine that will train.

    Raises:
        LedgerError: The folder's ledger belongs to another configuration or another store, or the run began with other
            nodes, or without any.
        UnheardError: The run cannot be trained as configured (`check_run`, `check_engine`).
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
    check_nodes(folder, saved_positions(folder))
    nodes = nodes_record(engine)
    is_same = folder.nodes_digest() == (None if nodes is None else hashlib.sha256(nodes).hexdigest())
    # DP: the statement names the trust model that the run began with; users trusted nobody with more than that.
    if not is_same and folder.saved_round < run.training.rounds:
        began = "on its users' nodes" if folder.federated.exists() else "on this machine, without nodes"
        raise LedgerError(
            f"{folder.path} began {began} ({folder.federated.name} records it), and its statement says whom its users trust. It "
            "cannot continue in another way: resume it with --on flower if it has that file, else with --on here, and with "
            "the same [engine] secure_aggregation; or begin a new run."
        )
    check_engine(engine, store, run.plan)
    return PreparedRun(run=run, folder=folder, store=store, users=training_users(engine, store))


def check_run(run: Run, store: TokenStore, users: UserTokens | None = None) -> None:
    """Check that a run fits its store, so that training does not fail later.

    Logs a warning if the declared population is smaller than the number of users, or much larger.

    Args:
        run: The run as configured.
        store: The store of the run.
        users: The users to train on; None for the training users of the store. The nodes of a federated run check the
            text of their users themselves.

    Raises:
        ModelError: The model does not fit the vocabulary or the user features, draws random numbers, or keeps a state
            between calls.
        CorpusError: The store has no training users or no held-out users, or its table of users' boundaries is damaged.
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
    if FEW_USERS * users.num_users < run.plan.population:
        # Reveals one bit about the number of users to the store's owner, like the warning below.
        logging.getLogger("unheard").warning(
            "The declared population (privacy.population = %d) is more than %d times the number of users in %s. The "
            "guarantee holds, because users are drawn with the declared q; but a round has far fewer users than "
            "users_per_round, so the noise is large compared with their average update. Declare a public number that is "
            "near the number of users.",
            run.plan.population,
            FEW_USERS,
            store.path,
        )
    if users.num_users > run.plan.population:
        # This warning reveals one bit about the number of users to the store's owner. It never prints the number
        # itself.
        logging.getLogger("unheard").warning(
            "The declared population (privacy.population = %d) is smaller than the number of users in %s. The guarantee "
            "holds, because users are drawn with the declared q; but a round has more users than users_per_round, and costs "
            "more epsilon than it would with a larger population. Declare a public number that is at least as large as the "
            "number of users.",
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
    """Raise `ModelError` if the model draws random numbers (active dropout does), or keeps a state between calls."""
    params = model.layout.split(model.initial(0))
    features_F = unknown_features(model)
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
        """The registered users, numbered from 0. Their text cannot be read on this machine."""
        ...

    def check_plan(self, plan: Plan) -> None:
        """Raise `UnheardError` if the nodes cannot run the plan as declared."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """The facts about server and nodes that federated.json states, such as whom the users must trust. Public."""
        ...


def nodes_record(engine: Engine) -> bytes | None:
    """Return the content of federated.json for a run on this engine; None for an engine without nodes."""
    return json.dumps(engine.facts).encode() if isinstance(engine, EngineWithUsers) else None


def training_users(engine: Engine, store: TokenStore) -> UserTokens:
    """Return the users that a round draws from: the nodes' users for a federated engine, otherwise the store's."""
    return engine.users if isinstance(engine, EngineWithUsers) else store.train


def check_engine(engine: Engine, store: TokenStore, plan: Plan) -> None:
    """Check that the engine can read every user's text and can add the declared noise.

    Callers use this before anything is charged.

    Args:
        engine: The engine that will train.
        store: The store of the run.
        plan: The plan of the run.

    Raises:
        CorpusError: Some users' text cannot be read (`check_all_users_reachable`).
        PrivacyError: The plan requires noise of federated nodes, and the engine has no nodes.
        UnheardError: The nodes of a federated run cannot run the plan.
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
    """Check that this process or another rank can read the text of every training user.

    Raises:
        CorpusError: No rank has the text of some users, or a rank has a different store.
    """
    if isinstance(engine, DistributedEngine):
        engine.check_replicas(store)
    elif not store.train.shards_here.all():
        raise CorpusError(
            f"{store.path} is a part of a store: it lacks the text of some users. Train on ranks that hold all parts "
            "together (torchrun), or give the whole store."
        )


def first_state(run: Run) -> State:
    """Return the state before round 0: the model initialised from `init_seed`, or the model at `init_from`.

    Raises:
        InvalidValue: `init_from` is neither a run folder nor a model file.
        UnprovenCombination: A private run starts from a model file without a ledger that is not declared public, or a
            run with a budget starts from an earlier run.
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
            f"{path} is a model without a ledger, so its privacy cost is unknown. Give its run folder, or, if none of "
            "these users contributed to it, set training.init_is_public = true."
        )
    if is_folder and run.budget is not None and not run.training.init_is_public:
        # DP: the budget was declared after results of the earlier run, so keeping it proves nothing about both runs.
        raise UnprovenCombination(
            f"[privacy] budget_epsilon with training.init_from = {str(path)!r}: the budget would have to cover the "
            "earlier run, which began before the budget was declared. Remove budget_epsilon, and set a budget of all "
            "runs before the first of them: unheard budget STORE --epsilon E."
        )
    return State(round=0, params_P=load_model(RunFolder(path).model if is_folder else path, run.model))


def population_ledger_of(run: Run, store: TokenStore, *, must_exist: bool = False) -> PopulationLedger:
    """Open the population's ledger, to which all runs on the store's users are charged.

    Args:
        run: The run, which may name a ledger outside the store's folder.
        store: The store of the run.
        must_exist: Whether to raise an error instead of creating a ledger that is missing.

    Raises:
        LedgerError: The ledger cannot be read or written, or is missing although it must exist.
    """
    return open_population_ledger(store.path, store.name, store.vocabulary_events, run.ledger, must_exist=must_exist)


def check_public_start(run: Run, population: PopulationLedger, first: State) -> None:
    """Raise `UnprovenCombination` if a model that was trained on this population is declared public.

    Args:
        run: The run as configured.
        population: The ledger of the run's users.
        first: The state before round 0, with the model that the run starts from.
    """
    start, of_run = run.training.init_from, None
    # DP: a model is known by the digest of its parameters, and a merged one by that of its files, wherever they lie.
    digests = {parameters_digest(first.params_P), run.model.weights_digest()}
    if start is not None and run.training.init_is_public:
        ledger = _ledger_beside(Path(start))
        of_run = None if ledger is None else run_id(ledger)
        # DP: the run of the model may itself have begun from a model that was trained on these users.
        digests |= set(_earlier_models(Path(start)))
    elif start is not None or run.model.origin() is None:
        return
    # DP: a run that these very users are charged for left no public model, whatever is declared.
    # DP: an earlier run on this store may have been charged to another ledger than this run.
    store = Path(run.corpus)
    # A ledger that the population's ledger contains is that ledger, perhaps at an earlier path.
    elsewhere = [p for p in known_ledgers(store) if not population.contains(known_position(store, p) or {"ledger": ""})]
    if missing := [path for path in elsewhere if not path.is_file()]:
        raise LedgerError(
            f"{missing[0]} is missing: earlier runs on {run.corpus} were charged there, so it is unknown whether "
            f"{start or 'the model'} was trained on these users. Put that ledger back."
        )
    others = [PopulationLedger.read(path) for path in elsewhere]
    for ledger in (population, *others):
        if of_run not in ledger.runs and digests.isdisjoint(ledger.released):
            continue
        raise UnprovenCombination(
            f"{start or 'The model'} was trained on these same users, or began from such a model (it is in their ledger, "
            f"{ledger.path}), so it is not public for them. Name its run folder in training.init_from, without "
            "training.init_is_public: the cost of that run is then part of the cost of this one."
        )


def _ledger_beside(start: Path) -> Ledger | None:
    """Return the ledger of the run that a model belongs to: a run folder, its model file or one of its checkpoints."""
    path = start.resolve()
    folders = [RunFolder(path)] if path.is_dir() else [RunFolder(folder) for folder in path.parents[:2]]
    folder = next((folder for folder in folders if folder.run_file.is_file() and folder.ledger.is_file()), None)
    return None if folder is None else Ledger.read(folder.ledger)


def _earlier_models(start: Path) -> list[str]:
    """Return the digests of the models from which the run of a model, and the runs before it, began."""
    if (ledger := _ledger_beside(start)) is not None:
        return earlier_models(ledger.facts)
    return read_facts(start).get("earlier", []) if start.is_file() else []


def charge_earlier_costs(run: Run, store: TokenStore, ledger: Ledger) -> None:
    """Charge the events before the first round: those of a private vocabulary, and those of the parent run.

    Args:
        run: The run as configured.
        store: The store of the run, which records the events of its vocabulary.
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
    """Read the ledger of the parent run, whose folder `init_from` names.

    Returns:
        The ledger; None if `init_from` is not a run folder, or its model is declared public.

    Raises:
        LedgerError: The ledger does not hold all charges of the parent's model.
    """
    if run.training.init_from is None or not Path(run.training.init_from).is_dir() or run.training.init_is_public:
        return None
    return read_run_ledger(run.training.init_from)


def ledger_header(run: Run, store: TokenStore, first: State, population: PopulationLedger) -> dict[str, Any]:
    """Return the header of a run's ledger: public facts such as the declared numbers, the first model and versions.

    The header may be published, so no fact may be computed from training users (for example their number). Check this
    before you add a fact.

    Args:
        run: The run as configured.
        store: The store of the run.
        first: The state before round 0.
        population: The ledger of the run's users.
    """
    vocabulary = {
        key: value for key, value in store.info.get("vocabulary", {}).items() if key not in ("events", "draws")
    }
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
        # DP: synthetic text has no guarantee for the users to whom it was fitted.
        **({"synthetic": f"fitted to {store.info['fitted_to']}"} if "fitted_to" in store.info else {}),
        "start": {
            **_start(run),
            **_base(run),
            "charges": earlier_charges,
            "sha256": parameters_digest(first.params_P),
        },
        "parameters": run.model.layout.total,
        "declared": declared_rounds(run),
        "corpus": store.name,
        "software": {**versions(), "torch": str(torch.__version__), **source_commit()},
        "run_hash": configuration,
        "run_id": new_run_id(
            None if run.training.reproducible_seed is None else _seeded_name(configuration, population)
        ),
    }


def _seeded_name(configuration: str, population: PopulationLedger) -> str:
    """Return the hash from which the id of a seeded run is computed.

    Args:
        configuration: The hash of the run's configuration.
        population: The ledger of the run's users.
    """
    # DP: a run with the same settings on other users has another id; with one id, the charges of one run would be taken
    # for those of the other. The identity of the ledger comes from a random number, and checkpoints state it already:
    # it says nothing about the text.
    return hashlib.sha256(f"{configuration}\n{population.position['ledger']}".encode()).hexdigest()


def declared_rounds(run: Run) -> dict[str, Any]:
    """Return what a run declares before its first round: its rounds, the event of each phase, and its budget."""
    phases = [(first, to_record(plan.event())) for first, plan in run.plan.phases(run.model.layout)]
    # DP: what the run may become is on record before anybody can have seen a result of it.
    return declaration(run.training.rounds, phases, run.budget)


@cache
def source_commit() -> dict[str, str]:
    """Return {"commit": hash} for a package that runs from its git repository, otherwise an empty dict.

    The hash ends in `-dirty` if tracked files were changed.
    """
    here = ["git", "-C", str(Path(__file__).parent)]
    try:
        # Fails if the package is installed inside the repository of another project, whose commit would be wrong.
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
    """Return the description of a new run's randomness for the header of its ledger. It does not contain the seed."""
    seed, shared = run.training.reproducible_seed, run.training.shared_cohorts
    if seed is None:
        return SecureStreams().describe()
    return ReproducibleStreams(seed=seed, scope="", shared_cohorts=shared).describe()


def _base(run: Run) -> dict[str, Any]:
    """Return the declared origin and the digest of a pre-trained model's weights; empty for a model without them.

    The header states them also for a run with `init_from`, because frozen weights remain part of the model.
    """
    origin = run.model.origin()
    if origin is None:
        return {}
    digest = run.model.weights_digest()
    return {"base": origin} if digest is None else {"base": origin, "base_sha256": digest}


def _start(run: Run) -> dict[str, Any]:
    """Return the origin of the first model, with the facts of the parent run that a statement must repeat."""
    if run.training.init_from is None:
        return {"from": f"seed {run.training.init_seed}" if run.model.origin() is None else "its base"}
    earlier = {"earlier": models} if (models := _earlier_models(Path(run.training.init_from))) else {}
    if run.training.init_is_public:
        return {"from": PUBLIC_START, **earlier}
    parent = Path(run.training.init_from)
    if not parent.is_dir():
        return {"from": UNKNOWN_START, **earlier}
    return {"from": EARLIER_RUN, **_inherited(Ledger.read(RunFolder(parent).ledger).facts), **earlier}


def _inherited(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a parent run that also concern a run that starts from its model.

    These are how the parent and its own parents drew their noise, whether they dropped duplicates, whether their text
    was synthetic, and whether one of them started from a model that was declared public.

    Args:
        facts: The header of the parent's ledger.
    """
    before = facts.get("start") or {}
    runs = (before, facts)
    seeded = [r["randomness"] for r in runs if (r.get("randomness") or {}).get("mode") == "reproducible"]
    # DP: noise of a known seed hides nothing, however many runs ago it was added.
    kept = {"randomness": seeded[0] if seeded else facts.get("randomness")}
    kept["drop_duplicates"] = any(r.get("drop_duplicates") for r in runs)
    # DP: the model depends on the users to whom the text was fitted, who may be users of the next run.
    if any(r.get("synthetic") for r in runs):
        kept["synthetic"] = facts.get("synthetic") or before["synthetic"]
    is_public = PUBLIC_START in (before.get("from"), before.get("base"))
    return {**kept, "base": PUBLIC_START} if is_public else kept


def reopen_ledgers(run: Run, folder: RunFolder, store: TokenStore) -> JointLedger:
    """Open the ledgers of an existing run for charging, and check that they hold all earlier charges.

    Args:
        run: The run as configured.
        folder: The run folder, locked.
        store: The store of the run.

    Raises:
        LedgerError: The run's or the population's ledger is missing, or was shortened, replaced or rolled back, or the
            store does not hold the text that the run began with.
        CheckpointCorrupt: A checkpoint cannot be read.
        RunFolderError: vocabulary.txt, tokens.json or statement.json is damaged or belongs to another run.
    """
    sources = saved_positions(folder)
    ledger = Ledger.open(folder.ledger)
    check_ledger(ledger, sources)
    check_nodes(folder, sources)
    # DP: training would go on, and charge rounds, in a folder whose words or statement are not those of its run.
    read_words(folder, run, ledger.facts)
    if folder.statement.exists():
        check_saved_statement(folder.statement, ledger.facts, ledger.entries, may_be_older=True)
    # DP: a population's ledger that a checkpoint remembers must be there; a new one would have forgotten its charges.
    is_known = any(source.population_position is not None for source in sources)
    population = population_ledger_of(run, store, must_exist=is_known)
    check_population(population, run_id(ledger), len(ledger), sources)
    charged_run = population.runs.get(run_id(ledger))
    # DP: the charges are those of the users that the run began with; others would take part in it uncharged.
    if (
        charged_run
        and not charged_run.has_repeats
        and charged_run.facts.get("store") not in (None, store.content_digest)
    ):
        raise LedgerError(
            f"{store.path} was prepared like the store that this run began with, but holds other text. Put the right "
            "store back, or name it with --corpus; for the new text, begin a new run."
        )
    return JointLedger(ledger, population)


def restore_state(run: Run, folder: RunFolder, device: torch.device) -> State:
    """Return the state of the newest checkpoint, on a device. Write a released model that is missing or older again.

    Args:
        run: The run as configured.
        folder: The run folder.
        device: Where the engine computes.

    Raises:
        CheckpointCorrupt: The checkpoint cannot be read, or belongs to another model.
    """
    checkpoint = newest_checkpoint(folder)
    if checkpoint.state.params_P.shape != (run.model.layout.total,):
        raise CheckpointCorrupt(
            f"The newest checkpoint does not fit this run's model, which has {run.model.layout.total} parameters. "
            "Delete it to resume from the one before."
        )
    restore_model(folder, run.model, checkpoint)
    state = checkpoint.state
    # Scalars of the server's memory (Adam's number of steps) stay on the CPU, because reading them would stall a GPU.
    memory = {name: t.to(device) if t.ndim else t for name, t in state.server_memory.items()}
    return replace(state, params_P=state.params_P.to(device), server_memory=memory)


def streams_of(run: Run, facts: Mapping[str, Any], content_digest: str) -> Streams:
    """Return the sources of randomness of a run: secure, or reproducible if the run has a `reproducible_seed`.

    Args:
        run: The run as configured.
        facts: The header of the run's ledger. The streams of a seeded run that began before version 0.2.0 depend on the
            seed alone.
        content_digest: The digest of the users' text (`TokenStore.content_digest`). Reproducible streams depend on it. It is
            private and is not written anywhere here.

    Raises:
        LedgerError: The header of a seeded run does not name the settings, the store and the first model.
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
    scope = hashlib.sha256("\n".join(map(str, [*parts, content_digest])).encode()).hexdigest()
    return ReproducibleStreams(seed=seed, scope=scope, shared_cohorts=run.training.shared_cohorts)
