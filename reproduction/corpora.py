"""The token stores of an experiment: which store has which role, and the population that is declared for it.

`find_corpora` reads the values of `--corpus` and `--population` and returns a `Corpus` per role:

    find_corpora(["corpora/blogs"])                     # a folder with main/, 20k/, 30k/, characters/, other/
    find_corpora(["main=stores/blogs"], ["9000"])       # one store, with a declared population

Without `--population` the training users are counted in the store, which is acceptable for research corpora only; see
docs/decisions/0060-populations-of-experiments.md. The module does not import torch.
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
    """One token store in its role."""

    role: str
    path: Path
    name: str
    """Display name: `blogs`."""
    population: int
    is_counted: bool
    """Whether the population was counted instead of declared: for research corpora only."""
    users: int
    held_out: int
    """Number of held-out users."""
    longest: int
    """Tokens of the longest training user. Like the count of users this is a fact about private data, for experiments
    only."""
    digest: str
    """Digest of how the store was prepared, as in the ledger of a run."""
    vocabulary_size: int
    vocabulary_digest: str


def find_corpora(given: Sequence[str], populations: Sequence[str] = (), name: str | None = None) -> dict[str, Corpus]:
    """Open the token stores.

    Args:
        given: Stores: `DIR`, a folder of stores named by role, or `ROLE=DIR`.
        populations: Declared populations: `N` for all versions of the main corpus, or `ROLE=N`.
        name: Display name of the main corpus; None means its own name.

    Returns:
        A corpus per role.

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
    """The path of each store by its role."""
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
    """The declared population by role."""
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
    """The name in the store, or the name of its folder.

    If that is just a role (`main`), the name of the folder above, except for synthetic stores.
    """
    name = str(store.info.get("name") or path.resolve().name)
    if name in CORPORA and not store.info.get("synthetic"):
        name = path.resolve().parent.name
    return re.sub(r"[^\w.-]+", "-", name) or "corpus"


def _check_one_dictionary(corpora: Mapping[str, Corpus]) -> None:
    """Models are carried from the other corpus to the main one, so both must have the same dictionary."""
    main, other = corpora.get("main"), corpora.get("other")
    if main and other and main.vocabulary_digest != other.vocabulary_digest:
        raise CorpusError(
            f"{other.path} has another dictionary than {main.path}: a model of one cannot be measured on the other. "
            "Prepare both with the same one (`python -m reproduction prepare INPUT --other OTHER` does)."
        )
