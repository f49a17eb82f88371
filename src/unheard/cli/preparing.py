"""Around the one call of `unheard prepare`: flags into parts, files into lists, a bar, the counts at the end."""

import json
from pathlib import Path
from typing import Any

from rich.markup import escape

from unheard.cli.display import bar, steps_console
from unheard.config import nearest, part_from_table
from unheard.corpus.canaries import Canary
from unheard.corpus.pipeline import Prepared
from unheard.corpus.sources import find_sources
from unheard.corpus.tokenizers import CharacterTokenizer, HuggingFaceTokenizer, Tokenizer, WordTokenizer
from unheard.corpus.vocabulary_sources import (
    CorpusVocabulary,
    FileVocabulary,
    PrivateVocabulary,
    PublicVocabulary,
    TokenizerVocabulary,
    VocabularySource,
)
from unheard.errors import InputError, InvalidValue, PrivacyError

__all__ = ["bar", "check_user_map", "choose_tokens", "choose_vocabulary", "read_canaries", "read_ids", "report"]


def choose_tokens(kind: str, punctuation: str) -> Tokenizer:
    if kind == "words":
        if punctuation not in ("tokens", "drop"):
            raise InvalidValue(f"--punctuation must be tokens or drop, not '{punctuation}'.")
        return WordTokenizer(punctuation=punctuation)
    return CharacterTokenizer() if kind == "characters" else HuggingFaceTokenizer.read(kind)


def choose_vocabulary(
    tokens: Tokenizer,
    kind: str,
    other: str | None,
    size: int,
    language: str,
    epsilon: float | None,
    delta: float | None,
    words_per_user: int,
    inputs: list[str],
) -> VocabularySource:
    if kind != "private" and (epsilon is not None or delta is not None):
        raise InvalidValue(
            "--vocab-epsilon and --vocab-delta go with --vocab private; a public vocabulary costs nothing."
        )
    if (kind == "from-corpus") != (other is not None):
        raise InvalidValue("--vocab from-corpus and --vocab-corpus OTHER go together.")
    if other is not None:
        _refuse_own_text(other, inputs)
        return CorpusVocabulary(path=other, size=size)
    if kind == "private":
        if epsilon is None or delta is None:
            raise InvalidValue("--vocab private needs its price: --vocab-epsilon and --vocab-delta.")
        return PrivateVocabulary(epsilon=epsilon, delta=delta, size=size, words_per_user=words_per_user)
    if kind == "tokenizer" or (kind == "public" and isinstance(tokens, HuggingFaceTokenizer)):
        return TokenizerVocabulary()
    if kind == "public":
        return PublicVocabulary(size=size, language=language)
    if not Path(kind).is_file():  # said before the text is read, which may take hours
        kinds = ("public", "private", "from-corpus", "tokenizer")
        raise InvalidValue(f"--vocab {kind} is no word list file, nor one of these.{nearest(kind, kinds)}")
    return FileVocabulary(path=kind, size=size)


def _refuse_own_text(other: str, inputs: list[str]) -> None:
    """The users' own words are private, whatever the flag calls them."""
    if (Path(other) / "corpus.json").is_file() or not Path(other).exists() or other.endswith(".txt"):
        return
    own = {Path(s.path).resolve() for s in find_sources(inputs) if s.format != "hub"}
    if own & {Path(s.path).resolve() for s in find_sources([other]) if s.format != "hub"}:
        raise PrivacyError(
            f"{other} is the users' own text: its words are not public. Use --vocab private, which pays for them."
        )


def check_user_map(path: Path | None, out: Path) -> None:
    """Who is which number must not travel with the store; and a place that cannot be written is told before hours of work."""
    if path is None:
        return
    if path.resolve().is_relative_to(out.resolve()):
        raise PrivacyError(f"--user-map {path} lies in the store, which holds no ids. Name a file outside {out}.")
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise InputError(f"--user-map {path} is not a file in a folder that is there: make the folder first.")


def read_ids(path: Path | None) -> tuple[str, ...]:
    """Ids of users who opted out or asked to be erased, one on each line."""
    if path is None:
        return ()
    try:
        return tuple(line for line in path.read_text(encoding="utf-8").split("\n") if line.strip())
    except (OSError, UnicodeDecodeError) as trouble:
        raise InputError(f"Cannot read --exclude-users {path}: {trouble}. Nothing was prepared.") from None


def read_canaries(path: Path | None) -> tuple[Canary, ...]:
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return tuple(part_from_table(Canary, json.loads(line), "canary") for line in lines if line.strip())
    except (OSError, ValueError) as trouble:
        raise InputError(
            f"Cannot read --canaries {path}: {trouble}. Give JSON lines with text, users, repeats."
        ) from None


_ROWS = {
    "malformed": "rows that are no valid {kind} or no valid UTF-8",
    "no_user": "rows without a user",
    "no_text": "rows without text",
    "no_time": "rows whose time is missing or cannot be read (kept, after the others)",
    "excluded": "rows of excluded users",
}


def report(done: Prepared) -> None:
    """What was left out and why, for the owner of the data."""
    counts: dict[str, Any] = done.counts
    steps_console.print("[bold]For the owner of the data only; exact counts of private users are unsafe to publish:[/]")
    rows = counts["rows"]
    steps_console.print(f"  {rows['rows']:>12,} rows read, {rows['kept']:,} used")
    for name, words in _ROWS.items():
        if rows.get(name):
            steps_console.print(f"  {rows[name]:>12,} {words.format(kind='JSON or CSV')}")
    for sentence in counts["noticed"]:
        steps_console.print(f"[bold yellow]Notice:[/] {escape(sentence)}")
    if counts["duplicate_posts"]:
        dropped = "dropped" if done.store.info["drop_duplicates"] else "kept; --drop-duplicates drops them"
        steps_console.print(
            f"  {counts['duplicate_posts']:>12,} posts that stand word for word under several users ({dropped})"
        )
    users = counts["users"]
    steps_console.print(
        f"  {users['users_seen']:>12,} users, {users.get('users_too_short', 0):,} too short and left out"
    )
    for split in ("train", "held_out", "public"):
        if users.get(f"{split}_users"):
            steps_console.print(
                f"  {users[f'{split}_users']:>12,} users in {split}, {users[f'{split}_tokens']:,} tokens"
            )
    if not users.get("held_out_users"):
        steps_console.print(
            "[bold yellow]Notice:[/] nobody is held out, so training, which measures on held-out users, will refuse this store. "
            "Raise --held-out, or gather more users."
        )
    print(f"{done.store.path}")
