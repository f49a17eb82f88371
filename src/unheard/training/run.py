"""Defines `Run`, the configuration of a training run, and reads and writes run files (TOML).

    run = Run(corpus="corpora/posts", model=TiedLSTM(), plan=Plan(...), training=Training(rounds=100))

    run, engine_choice = read_run_file("run.toml", ["clip.norm=10"])     # with overrides, as `--set clip.norm=10`
    text = run_toml(run, engine_choice)                                  # the complete file, defaults written out
    run_hash(run)                                                        # identifies the configuration in the ledger

A `Run` holds the parts (model, plan, server, evaluation) and checks that they fit together. Every table of a run file
is one part: `[clip] kind = "flat"`, `norm = 15.0` is `FlatClip(norm=15.0)`. An unknown key or kind raises `UnknownKey`,
and the message suggests the nearest valid name. `unheard init` writes a commented file; docs/run-file.md describes all
keys. The table [engine] (engine, device, processes) says how a run is computed. It is in the file but not in the `Run`.
"""

import dataclasses
import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from unheard import storage
from unheard.config import (
    nearest,
    parse_toml,
    part_from_table,
    part_of_kind,
    require,
    require_positive,
    table_from_part,
)
from unheard.engines.choice import EngineChoice
from unheard.errors import InvalidValue, UnknownKey
from unheard.evaluation.next_word import Evaluation
from unheard.mechanism.correlated import CorrelatedNoise
from unheard.mechanism.plan import KINDS, Change, Plan
from unheard.models.hugging_face import HuggingFaceModel
from unheard.models.model import LanguageModel
from unheard.models.module import ModuleModel
from unheard.models.recurrent import TiedGRU, TiedLSTM
from unheard.privacy.accountants import RUNNING_ACCOUNTANT
from unheard.privacy.budget import Budget
from unheard.privacy.population_ledger import check_ledger_path
from unheard.run_folder import ADDED_KEYS, configuration_hash
from unheard.training.round import SERVERS, AddServer, Server

MODELS: dict[str, type] = {
    "tied_lstm": TiedLSTM,
    "tied_gru": TiedGRU,
    "module": ModuleModel,
    "hugging_face": HuggingFaceModel,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "weights": {"kind": "equal"},
    "estimator": {"kind": "fixed_denominator"},
    "server": {"kind": "add"},
    "evaluation": {},
    "engine": {},
}
REQUIRED = ("corpus", "privacy", "model", "sampling", "update", "clip", "noise", "training")


@dataclass(frozen=True, kw_only=True)
class Training:
    """How long a run trains, which model it starts from, and how often it saves its state.

    >>> Training(rounds=1000, checkpoint_every=50).checkpoint_every
    50

    Args:
        rounds: The number of rounds to train.
        init_seed: The seed of the initial parameters. Runs with the same seed start from the same parameters, as the
            paper's runs do. The seed is public and does not influence the noise.
        init_from: A run folder or a model.safetensors whose model the run starts from, instead of random parameters.
            The charges of the earlier run are charged to this run too.
        init_is_public: Declares that no user of this store contributed to the model at `init_from`. Starting from it
            then costs the users nothing.
        checkpoint_every: The number of rounds between checkpoints. After a crash at most this many rounds run again and
            are charged again.
        keep_checkpoints: How many of the newest checkpoints are kept.
        reproducible_seed: For experiments only. Cohorts and noise are computed from the seed, the settings, the store
            and the first model. The guarantee does not hold against anyone who knows the seed. None, the default, uses
            secure randomness.
        shared_cohorts: For experiments that compare runs on the same cohorts. Cohorts and batches are computed from the
            seed alone. A statement about several runs cannot include a run with this setting.

    Raises:
        InvalidValue: A value is out of its range.
    """

    rounds: int
    init_seed: int = 0
    init_from: str | None = None
    init_is_public: bool = False
    checkpoint_every: int = 20
    keep_checkpoints: int = 2
    reproducible_seed: int | None = None
    shared_cohorts: bool = False

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "rounds must be at least 1.")
        require(self.checkpoint_every >= 1, "checkpoint_every must be at least 1.")
        require(self.keep_checkpoints >= 1, "keep_checkpoints must be at least 1.")
        require(self.init_seed >= 0, "init_seed must be 0 or more.")
        require(
            not self.shared_cohorts or self.reproducible_seed is not None,
            "shared_cohorts needs a reproducible_seed: secure cohorts are never the same.",
        )


@dataclass(frozen=True, kw_only=True)
class Run:
    """The complete configuration of a training run: everything that determines its result and its privacy cost.

    >>> import unheard
    >>> run = unheard.Run(
    ...     corpus="corpora/posts",
    ...     model=unheard.TiedLSTM(vocabulary_size=10_000),
    ...     plan=unheard.Plan(
    ...         population=50_000,
    ...         sampling=unheard.PoissonSampling(users_per_round=1000),
    ...         update=unheard.FedAvg(),
    ...         clip=unheard.FlatClip(norm=15.0),
    ...         noise=unheard.GaussianNoise(noise_multiplier=1.0),
    ...     ),
    ...     training=unheard.Training(rounds=1000),
    ... )
    >>> f"{run.claimed_delta:.2e}"
    '6.78e-06'

    Args:
        corpus: The folder of a token store (written by `unheard prepare`), or the `TokenStore`.
        model: The language model.
        plan: The parameters of Algorithm 1: sampling, updates, clip, estimator and noise.
        training: Rounds, initial model and checkpoints.
        delta: The delta at which epsilon is reported and claimed; None for population^-1.1, as in the paper.
        budget: An epsilon that the run must not exceed. Training stops before the first round that would exceed it.
        ledger: The path of the population's ledger, to which all runs on these users are charged; None for the one in
            the store's folder.
        server: What the server does with the noisy average of each round.
        evaluation: How often and on how much held-out text the model is evaluated.

    Raises:
        InvalidValue: delta is not above 0 and below 1 / population, or `ledger` is empty.
    """

    corpus: str | os.PathLike[str]
    model: LanguageModel
    plan: Plan
    training: Training
    delta: float | None = None
    budget: Budget | None = None
    ledger: Path | str | None = None
    server: Server = AddServer()
    evaluation: Evaluation = Evaluation()

    def __post_init__(self) -> None:
        check_ledger_path(self.ledger)
        if isinstance(self.plan.noise, CorrelatedNoise):
            noise = self.plan.noise.for_rounds(self.training.rounds)
            object.__setattr__(self, "plan", replace(self.plan, noise=noise))
        if not 0 < self.claimed_delta < 1 / self.plan.population:
            raise InvalidValue(
                f"delta = {self.claimed_delta:g} must be above 0 and below 1 / population = "
                f"{1 / self.plan.population:g}: a larger one would allow the release of one user's whole text. Lower it, or "
                "leave it out for population^-1.1."
            )

    @property
    def claimed_delta(self) -> float:
        """The delta of the guarantee: `delta`, or population^-1.1 if `delta` is None."""
        return self.delta if self.delta is not None else math.pow(self.plan.population, -1.1)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The table [corpus]: the folder of the token store.

    Args:
        path: The folder of a token store (`unheard prepare`), relative to the working folder.
    """

    path: str

    def __post_init__(self) -> None:
        require(bool(self.path.strip()), "path must name the folder of a corpus.")


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The table [privacy]: the declared population, the delta of the claim, and the budget.

    Args:
        population: The declared number of users, which may be published.
        delta: The delta of the claim; None for population^-1.1.
        budget_epsilon: The largest epsilon of the run. Training stops before the first round that would exceed it. None
            for no budget.
        budget_accountant: The accountant that computes the epsilon compared with the budget.
        ledger: The path of the population's ledger, needed if the store's folder cannot be written. All runs on these
            users must name the same file.
    """

    population: int
    delta: float | None = None
    budget_epsilon: float | None = None
    budget_accountant: str = RUNNING_ACCOUNTANT
    ledger: str | None = None

    def __post_init__(self) -> None:
        require(self.population >= 1, "population must be at least 1.")
        require_positive(budget_epsilon=self.budget_epsilon)


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Run, EngineChoice]:
    """Read a run file and check every key and value in it.

    Args:
        path: The file. A relative corpus path in it is relative to the working folder.
        overrides: Changes of single keys, each as "table.key=value" (`set_key`).

    Returns:
        The run, and the choice of engine.

    Raises:
        UnknownKey: A table, key or kind does not exist.
        InvalidValue: The file cannot be read, is not TOML, or a value is out of its range.
    """
    tables = _read_tables(path)
    for override in overrides:
        set_key(tables, override)
    return run_from_tables(tables, source=str(path))


def read_saved_run(path: str | Path) -> tuple[Run, EngineChoice]:
    """Read the run file of a run folder, which may be of an older version, and return the run and its engine.

    The run file of a folder is written with all keys. A key that is missing was added by a later version and gets the
    value that the older version used. Raises as `read_run_file`.
    """
    return run_from_tables(fill_added_keys(_read_tables(path)), source=str(path))


def fill_added_keys(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of an older version's run file with the keys added since then.

    An added key gets the value that the older version used, which may differ from today's default.
    """
    filled = dict(tables)
    for (table, kind, key), before in ADDED_KEYS.items():
        part = filled.get(table)
        if isinstance(part, dict) and part.get("kind") == kind:
            filled[table] = {key: before, **part}
    return filled


def _read_tables(path: str | Path) -> dict[str, Any]:
    """Read a run file and return its tables, unchecked. Raise `InvalidValue` if it cannot be read or is not TOML."""
    try:
        text = storage.regular_file(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidValue(
            f"Cannot read the run file {path}: {error.strerror}. Write one with `unheard init`."
        ) from None
    except UnicodeDecodeError:
        raise InvalidValue(
            f"The run file {path} is not UTF-8 text. Save it as UTF-8, or write one with `unheard init`."
        ) from None
    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidValue(f"{path} is not valid TOML: {error}.") from None


def run_from_tables(tables: Mapping[str, Any], *, source: str = "The run file") -> tuple[Run, EngineChoice]:
    """Build a run and its choice of engine from the tables of a run file. Raises as `read_run_file`.

    Args:
        tables: The tables by name.
        source: The name of the run file, for error messages.
    """
    known = {*REQUIRED, *DEFAULTS, "schedule"}
    for name in tables:
        if name not in known:
            raise UnknownKey(f"{source} has an unknown table [{name}].{nearest(name, known)}")
    if missing := [name for name in REQUIRED if name not in tables]:
        raise InvalidValue(f"{source} lacks [{'], ['.join(missing)}]. `unheard init` writes a complete one.")
    tables = {**DEFAULTS, **tables}
    if not isinstance(tables.get("schedule", []), list):
        raise InvalidValue("[[schedule]] is a list of changes: write it with two pairs of brackets.")
    privacy = part_from_table(Privacy, tables["privacy"], "privacy")
    plan = Plan(
        population=privacy.population,
        schedule=tuple(part_from_table(Change, t, "schedule") for t in tables.get("schedule", [])),
        **{name: part_of_kind(kinds, tables[name], name) for name, kinds in KINDS.items()},
    )
    run = Run(
        corpus=Path(part_from_table(Corpus, tables["corpus"], "corpus").path),
        model=part_of_kind(MODELS, tables["model"], "model"),
        plan=plan,
        training=part_from_table(Training, tables["training"], "training"),
        delta=privacy.delta,
        ledger=privacy.ledger,
        server=part_of_kind(SERVERS, tables["server"], "server"),
        evaluation=part_from_table(Evaluation, tables["evaluation"], "evaluation"),
    )
    if privacy.budget_epsilon is not None:
        budget = Budget(epsilon=privacy.budget_epsilon, delta=run.claimed_delta, accountant=privacy.budget_accountant)
        run = replace(run, budget=budget)
    return run, part_from_table(EngineChoice, tables["engine"], "engine")


def tables_from_run(run: Run, engine: EngineChoice = EngineChoice()) -> dict[str, Any]:
    """Return the tables of a run's complete run file, with every default written out."""
    privacy = Privacy(
        population=run.plan.population,
        delta=run.claimed_delta,
        budget_epsilon=run.budget.epsilon if run.budget else None,
        budget_accountant=run.budget.accountant if run.budget else RUNNING_ACCOUNTANT,
        ledger=None if run.ledger is None else str(run.ledger),
    )
    tables = {
        "corpus": {"path": str(run.corpus)},
        "privacy": table_from_part(privacy),
        "model": table_from_part(run.model, MODELS),
        **{name: table_from_part(getattr(run.plan, name), KINDS[name]) for name in KINDS},
        "server": table_from_part(run.server, SERVERS),
        "evaluation": table_from_part(run.evaluation),
        "training": table_from_part(run.training),
        "engine": table_from_part(engine),
    }
    if run.plan.schedule:
        tables["schedule"] = [table_from_part(change) for change in run.plan.schedule]
    return tables


def run_toml(run: Run, engine: EngineChoice = EngineChoice()) -> str:
    """Return the text of a run's complete run file, as TOML.

    Args:
        run: The run.
        engine: The choice of engine to write to the file. It does not change the run's hash.
    """
    return tomli_w.dumps(tables_from_run(run, engine))


def run_hash(run: Run) -> str:
    """Return a SHA-256 of all settings that determine the result and the privacy cost of a run.

    A run folder can be continued with a run of the same hash. The hash does not cover the paths of store, ledger and
    base model, the engine, the number of rounds and the checkpoint settings.
    """
    return configuration_hash(tables_from_run(run))


def hint_for_older_run(run: Run, folder_hash: str) -> str:
    """Return a sentence for an error message that names the override with which this run can continue an older folder.

    Args:
        run: The run as configured now.
        folder_hash: The run hash in the ledger of the folder.

    Returns:
        The sentence, or an empty string if no single override leads to that hash.
    """
    for (table, kind, key), before in ADDED_KEYS.items():
        tables = tables_from_run(run)
        if tables[table].get("kind") == kind:
            tables[table][key] = before
            if run_hash(run_from_tables(tables)[0]) == folder_hash:
                override = f"{table}.{key}={json.dumps(before)}"
                return (
                    f" It was begun with {override}, as all runs were before that key existed: --set {override} "
                    "continues it."
                )
    return ""


def set_key(tables: dict[str, Any], override: str) -> None:
    """Apply an override to the tables of a run file.

    >>> tables = {"clip": {"kind": "flat", "norm": 15.0}}
    >>> set_key(tables, "clip.norm=10")
    >>> tables
    {'clip': {'kind': 'flat', 'norm': 10}}

    Args:
        tables: The tables, changed in place.
        override: "table.key=value" with a TOML value. A value that is not valid TOML, such as a bare word, is taken as
            text. A new `kind` removes the keys that the new kind does not have.

    Raises:
        InvalidValue: The override does not have this form, or names something that is not a table.
    """
    key, equals, text = override.partition("=")
    table, dot, name = key.strip().partition(".")
    if not (equals and dot and table and name):
        raise InvalidValue(f"--set {override}: write table.key=value, for example --set clip.norm=10.")
    try:
        value = parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    target = tables.setdefault(table, {})
    *outer, last = name.split(".")
    for step in outer:
        target = target.setdefault(step, {}) if isinstance(target, dict) else None
    if not isinstance(target, dict):
        raise InvalidValue(f"--set {override}: [{table}] is not a table of keys.")
    target[last] = value
    kinds = {**KINDS, "model": MODELS, "server": SERVERS}.get(table, {})
    if last == "kind" and isinstance(value, str) and value in kinds:  # remove keys that the new kind does not have
        kept = {field.name for field in dataclasses.fields(kinds[value])} | {"kind"}
        tables[table] = {key: item for key, item in target.items() if key in kept}
