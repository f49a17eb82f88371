"""Everything that decides what is in a store, as one part; its public record is corpus.json.

In: fields, tokens, vocabulary, streams, splits and filters. Out: the table that may travel with runs: choices, no
counts.
"""

from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from unheard.config import require, table_from_part
from unheard.corpus.canaries import Canary
from unheard.corpus.readers.columns import Fields
from unheard.corpus.shard_writer import StreamRule
from unheard.corpus.splits import SplitRule
from unheard.corpus.tokenizers import Tokens, WordTokens, tokens_to_table
from unheard.corpus.vocabulary_sources import (
    CorpusVocabulary,
    FileVocabulary,
    FoundVocabulary,
    PrivateVocabulary,
    PublicVocabulary,
    TokenizerVocabulary,
    VocabularyChoice,
)

VOCABULARY_KINDS: dict[str, type] = {
    "public": PublicVocabulary,
    "file": FileVocabulary,
    "tokenizer": TokenizerVocabulary,
    "corpus": CorpusVocabulary,
    "private": PrivateVocabulary,
}


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Everything that decides what is in the store. Where it runs (engine, memory, workers) decides nothing."""

    fields: Fields
    tokens: Tokens = field(default_factory=WordTokens)
    vocabulary: VocabularyChoice = field(default_factory=PublicVocabulary)
    streams: StreamRule = field(default_factory=StreamRule)
    splits: SplitRule = field(default_factory=SplitRule)
    excluded: tuple[str, ...] = ()
    drop_duplicates: bool = False
    duplicate_chars: int = 100
    test_tokens: int = 0
    canaries: tuple[Canary, ...] = ()
    shards: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        require(self.shards >= 0, f"shards must be 0 (choose for me) or more, not {self.shards}.")
        require(self.test_tokens >= 0, f"test_tokens must be 0 or more, not {self.test_tokens}.")
        require(self.duplicate_chars >= 1, f"duplicate_chars must be 1 or more, not {self.duplicate_chars}.")
        require(not self.test_tokens or self.splits.held_out > 0, "Test posts come from held-out users: hold some out.")


def public_record(preparation: Preparation, found: FoundVocabulary, name: str) -> dict[str, Any]:
    """What may be published about the store: choices, never counts."""
    return {
        "name": preparation.name or name,
        "made_by": f"unheard {version('unheard')}",
        "synthetic": False,
        "canaries": bool(preparation.canaries),
        **choices(preparation),
        "vocabulary": {**_vocabulary_table(preparation.vocabulary), **found.provenance, "events": found.events},
        "excluded_users": bool(preparation.excluded),
        "drop_duplicates": preparation.drop_duplicates,
        "test_tokens": preparation.test_tokens,
    }


def choices(preparation: Preparation) -> dict[str, dict[str, Any]]:
    """The part of the record that is known before anything is read."""
    return {
        "tokens": tokens_to_table(preparation.tokens),
        "vocabulary": _vocabulary_table(preparation.vocabulary),
        "streams": table_from_part(preparation.streams),
        "splits": table_from_part(preparation.splits),
    }


def _vocabulary_table(choice: VocabularyChoice) -> dict[str, Any]:
    """The record of a choice; a path shrinks to its last name, since corpus.json may travel."""
    table = table_from_part(choice, VOCABULARY_KINDS)
    if "path" in table:
        table["path"] = Path(table["path"]).name
    return table
