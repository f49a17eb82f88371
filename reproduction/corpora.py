"""Which token store stands for which of the paper's corpora, and what population is declared for each.

In: `--corpus` and `--population` as they are given. Out: a Corpus for each role that there is. No torch.
Left out, the population is counted in the store: see docs/decisions/0060-populations-of-experiments.md.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reproduction.recipe import CORPORA
from unheard.corpus.store import TokenStore
from unheard.errors import CorpusError, CorpusMissing, InvalidValue


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """One store in its role."""

    role: str
    path: Path
    name: str
    """What it goes by in print: `blogs`."""
    population: int
    is_counted: bool
    """The population was not declared but counted: for research corpora only."""
    users: int
    held_out: int
    """Held-out users."""
    longest: int
    """Tokens of the training user who has most: like the count of users, a fact about private people, and for experiments only."""
    digest: str
    """Names the store by how it was prepared, as a run's ledger does."""
    vocabulary_size: int
    vocabulary_digest: str


def find_corpora(given: Sequence[str], populations: Sequence[str] = (), name: str | None = None) -> dict[str, Corpus]:
    """`DIR`, a folder of stores named by role, or `ROLE=DIR`; `N` or `ROLE=N` for populations. `name` is the main corpus's."""
    paths = _paths(given)
    declared = _populations(populations)
    corpora = {}
    for role, path in paths.items():
        store = TokenStore.open(path)
        users = store.train.num_users
        corpora[role] = Corpus(
            role=role,
            path=path,
            name=name if name and role == "main" else _name(store, path),
            population=declared.get(role, users),
            is_counted=role not in declared,
            users=users,
            held_out=store.held_out.num_users,
            longest=int(store.train.lengths().max(initial=0)),
            digest=store.name,
            vocabulary_size=len(store.vocabulary),
            vocabulary_digest=store.vocabulary.digest,
        )
    _check_one_dictionary(corpora)
    return corpora


def _paths(given: Sequence[str]) -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for text in given:
        role, equals, rest = text.partition("=")
        if equals and role in CORPORA:
            paths[role] = Path(rest)
        elif (Path(text) / "corpus.json").is_file():
            paths["main"] = Path(text)
        else:
            inside = {role: Path(text) / role for role in CORPORA if (Path(text) / role / "corpus.json").is_file()}
            if not inside:
                raise CorpusMissing(
                    f"--corpus {text}: neither a token store, nor a folder of stores named {', '.join(CORPORA)}, "
                    "nor ROLE=DIR with "
                    "one of these roles. Make them with `python -m reproduction prepare`."
                )
            paths = {**inside, **paths}
    return paths


def _populations(given: Sequence[str]) -> dict[str, int]:
    """A plain number is for the main corpus and its other forms: they are the same people."""
    declared: dict[str, int] = {}
    for text in given:
        role, equals, number = text.partition("=") if "=" in text else ("", "", text)
        if (equals and role not in CORPORA) or not number.strip().isdigit() or int(number) < 1:
            raise InvalidValue(
                f"--population {text}: write a whole number, or ROLE=N with a role of {', '.join(CORPORA)}."
            )
        roles = [role] if equals else ["main", "20k", "30k", "characters"]
        declared |= dict.fromkeys(roles, int(number))
    return declared


def _name(store: TokenStore, path: Path) -> str:
    """What the store calls itself; one that is called by its role goes by the folder around it, but for a synthetic one."""
    name = str(store.info.get("name") or path.resolve().name)
    if name in CORPORA and not store.info.get("synthetic"):
        name = path.resolve().parent.name
    return re.sub(r"[^\w.-]+", "-", name) or "corpus"


def _check_one_dictionary(corpora: Mapping[str, Corpus]) -> None:
    """Models go from the other corpus to the main one, so their words must be the same."""
    main, other = corpora.get("main"), corpora.get("other")
    if main and other and main.vocabulary_digest != other.vocabulary_digest:
        raise CorpusError(
            f"{other.path} has another dictionary than {main.path}: a model of one cannot be measured on the "
            "other. Prepare both "
            "with the same one (`python -m reproduction prepare INPUT --other OTHER` does)."
        )
