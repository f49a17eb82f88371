"""Open the token stores of an experiment, by role, with the population that is declared for each.

A role says what a store is used for: `main` is the corpus itself, `20k` and `30k` have larger dictionaries,
`characters` has characters as tokens, `other` is a second corpus, and `synthetic` is generated. `find_corpora` reads
the values of `--corpus` and `--population` and returns a `Corpus` per role:

    find_corpora(["corpora/blogs"])                     # a folder with main/, 20k/, 30k/, characters/, other/
    find_corpora(["main=stores/blogs"], ["9000"])       # one store, with a declared population

Without `--population` the training users are counted in the store, which is acceptable for research corpora only; see
docs/decisions/0060-populations-of-experiments.md. This module does not import torch, so that commands start fast.
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
    """A token store, its role, and the facts about it that runs and results need."""

    role: str
    """What the store is used for: one of `recipe.CORPORA`."""
    path: Path
    name: str
    """Name in tables and on pages, such as `blogs`."""
    population: int
    """The population K, declared or counted."""
    is_counted: bool
    """Whether the population was counted instead of declared, which is acceptable for research corpora only."""
    users: int
    """Number of training users in the store."""
    held_out: int
    """Number of held-out users."""
    longest: int
    """Number of tokens of the longest training user. Like the number of users, it depends on private data, so only
    experiments may use it."""
    digest: str
    """Name of the store in the ledger of a run: a digest of how the store was prepared."""
    vocabulary_size: int
    vocabulary_digest: str


def find_corpora(given: Sequence[str], populations: Sequence[str] = (), name: str | None = None) -> dict[str, Corpus]:
    """Open the token stores that the options of a command name.

    Args:
        given: Values of `--corpus`: a store, a folder of stores named by their roles, or `ROLE=DIR`.
        populations: Values of `--population`: `N` for all versions of the main corpus, or `ROLE=N`.
        name: Display name of the main corpus; None for the name in the store or of its folder.

    Returns:
        The corpora by role.

    Raises:
        CorpusMissing: A folder is not a store and holds none.
        InvalidValue: A population is not a positive number, or its role is unknown.
        CorpusError: The other corpus has another dictionary than the main one.
    """
    declared, corpora = _populations(populations), {}
    for role, path in _paths(given).items():
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
    """Return the path of each store by its role. Raise `CorpusMissing` if a value names no store."""
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
                    f"--corpus {text}: neither a token store, nor a folder of stores named {', '.join(CORPORA)}, nor "
                    "ROLE=DIR with one of these roles. Make them with `python -m reproduction prepare`."
                )
            paths = {**inside, **paths}
    return paths


def _populations(given: Sequence[str]) -> dict[str, int]:
    """Return the declared population by role. Raise `InvalidValue` for a value that is not `N` or `ROLE=N`."""
    declared: dict[str, int] = {}
    for text in given:
        role, equals, number = text.rpartition("=")
        if (equals and role not in CORPORA) or not number.strip().isdigit() or int(number) < 1:
            raise InvalidValue(
                f"--population {text}: write a whole number, or ROLE=N with a role of {', '.join(CORPORA)}."
            )
        roles = [role] if equals else ["main", "20k", "30k", "characters"]
        declared |= dict.fromkeys(roles, int(number))
    return declared


def _name(store: TokenStore, path: Path) -> str:
    """Return the display name of a store: the name in the store, or else the name of its folder.

    If this name is only a role (`main`), return the name of the parent folder, except for synthetic stores.
    """
    name = str(store.info.get("name") or path.resolve().name)
    if name in CORPORA and not store.info.get("synthetic"):
        name = path.resolve().parent.name
    return re.sub(r"[^\w.-]+", "-", name) or "corpus"


def _check_one_dictionary(corpora: Mapping[str, Corpus]) -> None:
    """Raise `CorpusError` if the other corpus and the main one have different dictionaries.

    A model that is trained on one of them is evaluated on the other, so the token ids must mean the same words.
    """
    main, other = corpora.get("main"), corpora.get("other")
    if main and other and main.vocabulary_digest != other.vocabulary_digest:
        raise CorpusError(
            f"{other.path} has another dictionary than {main.path}: a model of one cannot be measured on the other. "
            "Prepare both with the same one (`python -m reproduction prepare INPUT --other OTHER` does)."
        )
