"""Run files: a small TOML file that maps one to one onto the parts of a run, and back.

In: TOML text and `key=value` overrides. Out: a Run and the choice of engine; or the complete TOML of a run, defaults written out.
An unknown or mistyped key is an error that names the nearest right one.
"""

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from unheard.config import nearest, part_from_table, part_of_kind, require, require_positive, table_from_part
from unheard.engines.choice import EngineChoice
from unheard.errors import InvalidValue, UnknownKey
from unheard.evaluation.next_word import Evaluation
from unheard.mechanism.plan import KINDS, Plan
from unheard.mechanism.schedule import Change
from unheard.models.hugging_face import HuggingFaceModel
from unheard.models.module import ModuleModel
from unheard.models.recurrent import TiedGRU, TiedLSTM
from unheard.privacy.accountants import RUNNING_ACCOUNTANT
from unheard.privacy.budget import Budget
from unheard.training.run import Run, Training
from unheard.training.server import SERVERS

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
NOT_MEANING = (
    ("training", "rounds"),
    ("training", "checkpoint_every"),
    ("training", "keep_checkpoints"),
    ("engine",),
    ("corpus", "path"),
    ("model", "path"),  # of a Hugging Face folder, which base_sha256 names
    ("privacy", "ledger"),
)
"""Keys that may change between a run and its resumption: they move neither a model nor its cost."""
CAME_LATER = {("model", "tied_lstm", "keep_norm"): True, ("model", "tied_gru", "keep_norm"): True}
"""Keys (table, kind, key) that runs were made without, and what was done then, whatever is the default today. Where that is what
they say, a run has the hash that it had before there was such a key, and goes on."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Where the token store lies."""

    path: str

    def __post_init__(self) -> None:
        require(bool(self.path.strip()), "path must name the folder of a corpus.")


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What is declared and what is claimed."""

    population: int
    delta: float | None = None
    budget_epsilon: float | None = None
    budget_accountant: str = RUNNING_ACCOUNTANT
    ledger: str | None = None
    """Where all runs on these people are charged, if the store cannot be written. The same file for every run on them."""

    def __post_init__(self) -> None:
        require(self.population >= 1, "population must be at least 1.")
        require_positive(budget_epsilon=self.budget_epsilon)


def read_run_file(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Run, EngineChoice]:
    """The run that a file describes; a relative corpus path is relative to the working folder, as on any command line."""
    tables = _read_tables(path)
    for override in overrides:
        set_key(tables, override)
    return run_from_tables(tables)


def read_saved_run(path: str | Path) -> tuple[Run, EngineChoice]:
    """The run file in a run's own folder, where everything is written out: a key that it lacks came later."""
    return run_from_tables(as_it_was(_read_tables(path)))


def as_it_was(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables in which everything was written out, with what came later as it was done before."""
    filled = dict(tables)
    for (table, kind, key), before in CAME_LATER.items():
        part = filled.get(table)
        if isinstance(part, dict) and part.get("kind") == kind:
            filled[table] = {key: before, **part}
    return filled


def _read_tables(path: str | Path) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidValue(
            f"Cannot read the run file {path}: {error.strerror}. Write one with `unheard init`."
        ) from None
    except UnicodeDecodeError:
        raise InvalidValue(
            f"The run file {path} is not UTF-8 text. Save it as UTF-8, or write one with `unheard init`."
        ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidValue(f"{path} is not valid TOML: {error}.") from None


def run_from_tables(tables: Mapping[str, Any]) -> tuple[Run, EngineChoice]:
    known = {*REQUIRED, *DEFAULTS, "schedule"}
    for name in tables:
        if name not in known:
            raise UnknownKey(f"Unknown table [{name}] in the run file.{nearest(name, known)}")
    if missing := [name for name in REQUIRED if name not in tables]:
        raise InvalidValue(f"The run file lacks [{'], ['.join(missing)}]. `unheard init` writes a complete one.")
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
        run = Run(**{**run.__dict__, "budget": budget})
    return run, part_from_table(EngineChoice, tables["engine"], "engine")


def tables_from_run(run: Run, engine: EngineChoice = EngineChoice()) -> dict[str, Any]:
    """The complete tables of a run: what was left out is written out."""
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
    return tomli_w.dumps(tables_from_run(run, engine))


def run_hash(run: Run) -> str:
    """Names what a run means: equal for runs that may continue each other."""
    tables = tables_from_run(run)
    for table, *key in NOT_MEANING:
        if key:
            tables[table].pop(key[0], None)
        else:
            del tables[table]
    for (table, kind, key), before in CAME_LATER.items():
        if (tables[table].get("kind"), tables[table].get(key)) == (kind, before):
            del tables[table][key]
    return hashlib.sha256(json.dumps(_plain(tables), sort_keys=True).encode()).hexdigest()


def hint_for_older_run(run: Run, begun: str) -> str:
    """What to change in this run, if a folder's hash is that of the same run as it was before a key came; empty if of another."""
    for (table, kind, key), before in CAME_LATER.items():
        tables = tables_from_run(run)
        if tables[table].get("kind") == kind:
            tables[table][key] = before
            if run_hash(run_from_tables(tables)[0]) == begun:
                said = f"{table}.{key}={json.dumps(before)}"
                return (
                    f" It was begun with {said}, as all were before there was that key: --set {said} goes on with it."
                )
    return ""


def _plain(value: Any) -> Any:
    """One spelling for each value: 20 in Python and 20.0 read back from TOML are the same number."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def set_key(tables: dict[str, Any], override: str) -> None:
    """--set clip.norm=10: a dotted key and a TOML value; a bare word is text."""
    key, equals, text = override.partition("=")
    table, dot, name = key.strip().partition(".")
    if not (equals and dot and table and name):
        raise InvalidValue(f"--set {override}: write table.key=value, for example --set clip.norm=10.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    place = tables.setdefault(table, {})
    *outer, last = name.split(".")
    for step in outer:
        place = place.setdefault(step, {}) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        raise InvalidValue(f"--set {override}: [{table}] is not a table of keys.")
    place[last] = value
    kinds = {**KINDS, "model": MODELS, "server": SERVERS}.get(table, {})
    if last == "kind" and isinstance(value, str) and value in kinds:  # another kind: what only the old one had goes
        kept = {field.name for field in dataclasses.fields(kinds[value])} | {"kind"}
        tables[table] = {key: item for key, item in place.items() if key in kept}
