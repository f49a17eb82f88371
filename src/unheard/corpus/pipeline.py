"""The corpus that the software installs with: real chat, pseudonymous, MIT; small enough for a first run in seconds.

In: the PyPI package `chitchat-dataset` 0.9. Out: a token store by the same pipeline as any other input. 1,315 users,
two of whom wrote 18 % of the words: users with at least 100 tokens stay, and none counts for more than 1,600.
From any user-keyed text to a token store, in one call that can be stopped and run again.

In: inputs, and one `Preparation`, which is also the record that the store keeps. Out: a TokenStore and what was
noticed. Steps, each of which leaves finished files behind and is skipped when they are there: import, scan,
vocabulary, streams, extras.
"""

import hashlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import duckdb

from unheard.config import require, table_from_part
from unheard.corpus.backends import Grouping, GroupingBackend
from unheard.corpus.backends.duckdb import DuckDBBackend
from unheard.corpus.canaries import Canary, plant
from unheard.corpus.conversion import CHITCHAT_FIELDS, find_chitchat, import_source
from unheard.corpus.encode import EncodeShard, EncodingOptions
from unheard.corpus.progress import Progress
from unheard.corpus.scan import batches
from unheard.corpus.shards import Shard, token_dtype, write_shard
from unheard.corpus.sources import Fields, Source
from unheard.corpus.splits import SplitRule, draw_test_posts
from unheard.corpus.store import StoreWriter, TokenStore, UserTokens, write_private_json
from unheard.corpus.tokenizers import Tokenizer, WordTokenizer, tokenizer_to_table
from unheard.corpus.vocabulary_sources import (
    CorpusVocabulary,
    FileVocabulary,
    PrivateVocabulary,
    PublicVocabulary,
    TokenizerVocabulary,
    VocabularyResult,
    VocabularySource,
)
from unheard.errors import ConfigError, InputError

_SHARD_BYTES = 64 << 20

VOCABULARY_KINDS: dict[str, type] = {
    "public": PublicVocabulary,
    "file": FileVocabulary,
    "tokenizer": TokenizerVocabulary,
    "corpus": CorpusVocabulary,
    "private": PrivateVocabulary,
}


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Everything that decides what is in the store. Where it runs (backend, memory, workers) decides nothing."""

    fields: Fields
    tokenizer: Tokenizer = field(default_factory=WordTokenizer)
    vocabulary: VocabularySource = field(default_factory=PublicVocabulary)
    encoding: EncodingOptions = field(default_factory=EncodingOptions)
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


def public_record(preparation: Preparation, found: VocabularyResult, name: str) -> dict[str, Any]:
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
        "tokens": tokenizer_to_table(preparation.tokenizer),
        "vocabulary": _vocabulary_table(preparation.vocabulary),
        "streams": table_from_part(preparation.encoding),
        "splits": table_from_part(preparation.splits),
    }


def _vocabulary_table(choice: VocabularySource) -> dict[str, Any]:
    """The record of a choice; a path shrinks to its last name, since corpus.json may travel."""
    table = table_from_part(choice, VOCABULARY_KINDS)
    if "path" in table:
        table["path"] = Path(table["path"]).name
    return table


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A finished store with its counts, which are the owner's alone."""

    store: TokenStore
    counts: dict[str, Any]


def build_store(
    sources: Sequence[Source],
    out: str | os.PathLike[str],
    preparation: Preparation,
    *,
    backend: GroupingBackend | None = None,
    memory_bytes: int = 1 << 30,
    user_map: str | os.PathLike[str] | None = None,
    progress: Progress = lambda step, fraction: None,
) -> Prepared:
    """Make a store of what the sources hold. The same call again after a stop goes on where it was."""
    backend = backend or DuckDBBackend()
    writer = StoreWriter(out, keep_partial=True)
    try:
        return _prepare(sources, writer, preparation, backend, memory_bytes, user_map, progress)
    except (InputError, ConfigError):
        # The same call would be refused again: nothing to go on with, and raw text should not lie about.
        shutil.rmtree(writer.partial, ignore_errors=True)
        raise


def _prepare(
    sources: Sequence[Source],
    writer: StoreWriter,
    preparation: Preparation,
    backend: GroupingBackend,
    memory_bytes: int,
    user_map: str | os.PathLike[str] | None,
    progress: Progress,
) -> Prepared:
    work, mapped = writer.partial / "work", user_map is not None
    _begin_or_resume(work, sources, [preparation, type(backend).__name__, duckdb.__version__, mapped])
    readable = [file for i, s in enumerate(sources) for file in import_source(s, i, work, preparation.fields)]
    grouping = Grouping(
        work=work,
        fields=preparation.fields,
        shards=preparation.shards or choose_shards(readable),
        excluded=preparation.excluded,
        duplicate_chars=preparation.duplicate_chars,
        drop_duplicates=preparation.drop_duplicates,
        memory_bytes=memory_bytes,
    )
    counts: dict[str, Any] = {"inputs": [{"path": s.path, "bytes": _size(s)} for s in sources]}
    rows = backend.scan(grouping, batches(readable), progress)
    if not rows["kept"]:
        told = "".join(f" {sentence}" for sentence in grouping.noticed())
        raise InputError(f"No usable row in the input: {_troubles(rows)}. {_cure(rows)}{told}")
    counts["rows"] = dict(sorted(rows.items()))
    counts["noticed"] = grouping.noticed()
    counts["duplicate_posts"] = backend.find_duplicates(grouping)
    found = preparation.vocabulary.find(preparation, backend, grouping, progress)
    counts["users"] = _write_streams(backend, grouping, preparation, found, writer.partial, mapped, progress)
    if not counts["users"].get("train_users"):
        raise InputError(_nobody(preparation, counts["users"]))
    if user_map is not None:
        _write_user_map(Path(user_map), work, grouping.shards)
    # From here on a stop means to begin again: what follows changes finished shards.
    os.replace(work, writer.partial / "gone")
    shutil.rmtree(writer.partial / "gone")
    _extras(preparation, found, writer.partial, grouping.shards)
    record = public_record(preparation, found, writer.path.name)
    store = writer.finish(vocabulary=found.vocabulary, info=record, counts=counts, shards=grouping.shards)
    return Prepared(store=store, counts=counts)


def choose_shards(sources: Sequence[Source]) -> int:
    """Enough that one fits in memory while it is sorted: 64 MiB of text each, up to 64; then they grow to 1 GiB."""
    total = sum(s.text_bytes for s in sources)
    return max(1, min(math.ceil(total / _SHARD_BYTES), 64), min(math.ceil(total / (1 << 30)), 1024))


def _begin_or_resume(work: Path, sources: Sequence[Source], asked: list[Any]) -> None:
    """Go on only with exactly the same question: other inputs or options begin again from nothing."""
    question = repr([*asked, version("unheard"), [(s, _size(s), _changed(s)) for s in sources]])
    plan = {"question": hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()}
    file = work / "plan.json"
    if not file.is_file() or json.loads(file.read_text()) != plan:
        for old in work.parent.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        (work / "streams").mkdir(parents=True)
        (work / "names").mkdir()
        file.write_text(json.dumps(plan))


def _write_streams(
    backend: GroupingBackend,
    grouping: Grouping,
    preparation: Preparation,
    found: VocabularyResult,
    partial: Path,
    mapped: bool,
    progress: Progress,
) -> dict[str, int]:
    """Every shard's streams; a shard with a result file is finished."""
    results = grouping.work / "streams"
    task = EncodeShard(
        folder=partial,
        tokens=preparation.tokenizer,
        vocabulary=found.vocabulary,
        rule=preparation.encoding,
        splits=preparation.splits,
        names=grouping.work / "names" if mapped else None,
    )
    waiting = [s for s in range(grouping.shards) if not (results / f"{s:05d}.json").is_file()]
    done = grouping.shards - len(waiting)
    progress("Writing", done / grouping.shards)
    for shard, result in backend.over_shards(grouping, task, waiting):
        file = results / f"{shard:05d}.json"
        file.with_suffix(".writing").write_text(json.dumps(result))
        os.replace(file.with_suffix(".writing"), file)
        done += 1
        progress("Writing", done / grouping.shards)
    total: Counter[str] = Counter()
    for shard in range(grouping.shards):
        total.update(json.loads((results / f"{shard:05d}.json").read_text()))
    return dict(sorted(total.items()))


def _extras(preparation: Preparation, found: VocabularyResult, partial: Path, shards: int) -> None:
    """What is made from finished streams: canaries in training users, test posts from held-out ones."""
    dtype = token_dtype(len(found.vocabulary))
    if preparation.canaries:
        record = plant(preparation.canaries, partial / "train", shards, found.vocabulary, preparation)
        write_private_json(partial / "canaries.json", record)
    if preparation.test_tokens:
        held_out = UserTokens(
            [Shard.found(partial / "held_out" / f"{s:05d}.offsets", dtype) for s in range(shards)], dtype
        )
        posts = draw_test_posts(held_out, preparation.test_tokens, preparation.splits.salt)
        write_shard(partial / "test_posts", 0, posts, dtype)


def _write_user_map(path: Path, work: Path, shards: int) -> None:
    """Who is which number: outside the store, on request, readable by its owner only."""
    entries: list[dict[str, Any]] = []
    numbers: Counter[str] = Counter()
    for shard in range(shards):
        for split, users in json.loads((work / "names" / f"{shard:05d}.json").read_text(encoding="utf-8")).items():
            entries += [{"split": split, "number": numbers[split] + i, "user": user} for i, user in enumerate(users)]
            numbers[split] += len(users)
    write_private_json(path, entries)


def _nobody(preparation: Preparation, users: dict[str, int]) -> str:
    rule = preparation.encoding
    if users.get("users_seen") == users.get("users_too_short"):
        return f"No user has {rule.min_tokens} tokens or more: lower --min-tokens or --tokens-per-user."
    return "No user is left to train on: all are held out or public. Lower --held-out or --public."


def _troubles(rows: Counter[str]) -> str:
    return ", ".join(
        f"{rows[name]} {name.replace('_', ' ')}" for name in ("malformed", "no_user", "no_text", "excluded")
    )


def _cure(rows: Counter[str]) -> str:
    if not rows["rows"]:
        return "It is empty."
    if rows["malformed"] == rows["rows"]:
        return "Check that it is UTF-8, and what its name or --format says it is (a JSON array is .json, its lines .jsonl)."
    return "Check --user-field and --text-field."


def _size(source: Source) -> int:
    return os.path.getsize(source.path) if os.path.isfile(source.path) else 0


def _changed(source: Source) -> int:
    return os.stat(source.path).st_mtime_ns if os.path.isfile(source.path) else 0


CHITCHAT = Preparation(
    fields=CHITCHAT_FIELDS,
    encoding=EncodingOptions(min_tokens=100, tokens_per_user=1600),
    splits=SplitRule(held_out=0.1),
    name="chitchat",
)


def prepare_chitchat(out: str | os.PathLike[str], progress: Progress = lambda step, fraction: None) -> Prepared:
    """The default corpus as a store at `out`: a few seconds."""
    return build_store([find_chitchat()], out, CHITCHAT, progress=progress)
