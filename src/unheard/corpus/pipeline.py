"""Runs the steps of `prepare`, which make a token store of text with user ids. A repeated call resumes.

    preparation = Preparation(fields=Fields(user="author", text="body"), encoding=EncodingOptions(tokens_per_user=1600))
    result = build_store(find_sources(["posts.jsonl"]), "corpora/posts", preparation)
    result.store, result.counts

`Preparation` holds every choice that decides the content of the store; its public record is corpus.json. The backend,
the memory and the number of processes do not change the store. There are five steps:

    1. convert   Convert input that DuckDB does not read (`conversion`).
    2. scan      Write every row to a file of its shard (`grouping`, `readers`).
    3. build     Build the vocabulary (`vocabulary`, `private_vocabulary`).
    4. encode    Write the streams of the users of each shard (`encode`).
    5. finish    Write the map of user ids, plant canaries, draw test posts; then move the store to its path.

Each step writes its files to the folder `<out>.partial`. A repeated call skips the work whose files are complete. The
words of a private vocabulary and the log of its cost stay in this folder even if a later step fails.

A store contains no user ids. On request the ids of its users are written to the map of user ids: a file outside the
store, for its owner only, with the columns split, number and user, for example to erase a user or to look at one user's
text.

`unheard.prepare` and the command `unheard prepare` are built on this module. Their options become a `Preparation` in
`prepare`.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import duckdb

from unheard import storage
from unheard.config import require, table_from_part
from unheard.corpus import Progress, no_progress
from unheard.corpus.canaries import Canary, check_canary_words, plant_canaries
from unheard.corpus.conversion import convert_source
from unheard.corpus.encode import EncodeShard, EncodingOptions, GroupedText, unknown_rate
from unheard.corpus.grouping import DuckDBBackend, Grouping, GroupingBackend, SplitRule, read_work_file
from unheard.corpus.private_vocabulary import CorpusVocabulary, PrivateVocabulary
from unheard.corpus.readers import open_database, quoted, sql_list
from unheard.corpus.sources import Fields, Source, make_batches
from unheard.corpus.store import (
    Shard,
    StoreWriter,
    TokenStore,
    UserTokens,
    token_dtype,
    write_private_json,
    write_shard,
)
from unheard.corpus.tokenizers import Tokenizer, WordTokenizer, tokenizer_to_table, unspaced_share
from unheard.corpus.vocabulary import (
    FileVocabulary,
    PublicVocabulary,
    ReleaseLog,
    TokenizerVocabulary,
    Vocabulary,
    VocabularyResult,
    VocabularySource,
    likely_language,
)
from unheard.errors import ConfigError, CorpusError, InputError, PrivacyError

# This logger gets only the names of steps and public choices, never counts of users: log files may be shared.
logger = logging.getLogger("unheard.corpus")

_SHARD_BYTES = 64 << 20
_SAMPLED_POSTS = 1000
MANY_UNKNOWN = 0.15
"""If a larger fraction of the words is not in a public vocabulary, the text is probably in another language."""
USER_MAP_FORMATS = {
    ".csv": "FORMAT csv, HEADER",
    ".json": "FORMAT json, ARRAY true",
    ".jsonl": "FORMAT json",
    ".parquet": "FORMAT parquet",
}
"""The name of a map of user ids ends in one of these, which says how DuckDB writes it."""

VOCABULARY_KINDS: dict[str, type] = {
    "public": PublicVocabulary,
    "file": FileVocabulary,
    "tokenizer": TokenizerVocabulary,
    "corpus": CorpusVocabulary,
    "private": PrivateVocabulary,
}
"""The classes of vocabulary sources, by their names in corpus.json."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Every choice that decides the content of a store.

    Args:
        fields: The columns to read.
        tokenizer: Splits text into tokens.
        vocabulary: Where the words come from.
        encoding: How posts become streams, and which users stay.
        splits: Which users train and which are held out.
        excluded: Ids of users to leave out, for example because they opted out.
        drop_duplicates: Whether to leave out posts that several users wrote word for word.
        duplicate_chars: The least number of characters of such a post.
        test_tokens: The number of tokens of a test set of random held-out posts; 0 makes no test set.
        canaries: Secrets to plant for an audit.
        shards: The number of shards; 0 chooses it by the size of the input.
        name: The name of the corpus; empty means the name of the folder.
    """

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
        require(self.shards >= 0, f"shards must be 0 (chosen by the size of the input) or more, not {self.shards}.")
        require(self.test_tokens >= 0, f"test_tokens must be 0 or more, not {self.test_tokens}.")
        require(self.duplicate_chars >= 1, f"duplicate_chars must be 1 or more, not {self.duplicate_chars}.")
        require(not self.test_tokens or self.splits.held_out > 0, "Test posts come from held-out users: hold some out.")

    def choices(self) -> dict[str, dict[str, Any]]:
        """Return the part of corpus.json that is known before the input is read, with the keys of that file."""
        return {
            "tokens": tokenizer_to_table(self.tokenizer),
            "vocabulary": vocabulary_source_to_table(self.vocabulary),
            "streams": table_from_part(self.encoding),
            "splits": table_from_part(self.splits),
        }

    def public_record(self, vocabulary: VocabularyResult, folder_name: str) -> dict[str, Any]:
        """Return the content of corpus.json. It contains choices and no counts, so it may be published with a run.

        Args:
            vocabulary: The vocabulary with its origin and cost.
            folder_name: The name of the corpus if `name` is empty.
        """
        choices = self.choices()
        choices["vocabulary"] |= {**vocabulary.provenance, "events": vocabulary.events}
        return {
            "name": self.name or folder_name,
            "made_by": f"unheard {version('unheard')}",
            "synthetic": False,
            "canaries": bool(self.canaries),
            **choices,
            "excluded_users": bool(self.excluded),
            "drop_duplicates": self.drop_duplicates,
            "test_tokens": self.test_tokens,
        }


def vocabulary_source_to_table(source: VocabularySource) -> dict[str, Any]:
    """Return the record of a vocabulary source for corpus.json.

    Only the last part of a path is recorded, since corpus.json may be published.
    """
    table = table_from_part(source, VOCABULARY_KINDS)
    if "path" in table:
        table["path"] = Path(table["path"]).name
    return table


@dataclass(frozen=True, kw_only=True)
class PreparedStore:
    """A finished store and its exact counts.

    Attributes:
        store: The opened store.
        counts: The exact counts of rows, users and tokens, which are for the owner of the data only.
        language: If more than `MANY_UNKNOWN` of the words are not in a public vocabulary: the probable language of the
            text. Otherwise, or if no language fits, None.
    """

    store: TokenStore
    counts: dict[str, Any]
    language: str | None = None


def build_store(
    sources: Sequence[Source],
    out: str | os.PathLike[str],
    preparation: Preparation,
    *,
    backend: GroupingBackend | None = None,
    memory_bytes: int = 1 << 30,
    user_map: str | os.PathLike[str] | None = None,
    continues: str | os.PathLike[str] | None = None,
    progress: Progress = no_progress,
) -> PreparedStore:
    """Make a store of the text in the sources. After an interruption, the same call resumes the work.

    Args:
        sources: The input, from `find_sources`.
        out: The folder of the store; it must be missing or empty.
        preparation: What the store contains.
        backend: The backend that groups the rows; by default DuckDB on this machine with one process per core.
        memory_bytes: The memory limit of the grouping.
        user_map: A file outside the store for the map from user ids to user numbers. The suffix of its name decides
            the format (`USER_MAP_FORMATS`). By default no map is written.
        continues: An earlier store with (some of) the same users. Its charges and its budget are copied to the ledger
            of the new store.
        progress: Called with the name of each step and its finished fraction.

    Returns:
        The store and its counts.

    Raises:
        InputError: The input cannot be used: a missing column, no usable row, no user left.
        PrivacyError: The corpus that a public vocabulary comes from is one of the sources, or the map of user ids would
            be in the store.
        CorpusError: `out` is not empty, the disk is full, or `continues` is not a store.
        LedgerError: The ledger of `continues` is damaged or missing.
        InvalidValue: `out` is not UTF-8.
    """
    if user_map is not None:
        check_user_map(Path(user_map), Path(out))
    require(
        storage.is_utf8(out), f"--out {str(out)!r} is not UTF-8, and DuckDB cannot write there. Name another folder."
    )
    if isinstance(preparation.vocabulary, CorpusVocabulary):
        # DP: the words of the users' own text are not public, under whatever name they are given.
        preparation.vocabulary.check_is_public(sources)
    earlier = None if continues is None else _ledger_of(TokenStore.open(continues))
    writer = StoreWriter(out, keep_partial=True)
    chosen = backend or DuckDBBackend()
    try:
        with chosen.kept_processes() if isinstance(chosen, DuckDBBackend) else contextlib.nullcontext():
            prepared = _run_steps(sources, writer, preparation, chosen, memory_bytes, user_map, earlier, progress)
        if earlier is not None:
            _ledger_of(prepared.store)  # opening the new ledger copies the earlier charges into it
        return prepared
    except (InputError, ConfigError) as error:
        # The same call would fail again, so the files are of no use, and raw text should not stay on disk.
        _delete_files(writer.partial)
        if any(writer.partial.iterdir()):
            raise type(error)(
                f"{error} Words of the users were drawn before this error. They and their cost are kept in "
                f"{writer.partial}: the next command with this --out and the same text uses them again, and any other "
                "one is charged for them."
            ) from error
        writer.partial.rmdir()
        raise


def _ledger_of(store: TokenStore) -> Path:
    """Open the ledger of a store's population, with the same checks as before a run, and return its path.

    Raises:
        LedgerError: The ledger is damaged or missing, or runs on the store were charged in another one.
    """
    from unheard.privacy.population_ledger import open_population_ledger  # here, because it loads scipy

    return open_population_ledger(store.path, store.name, store.vocabulary_events, must_be_only=True).path


def _run_steps(
    sources: Sequence[Source],
    writer: StoreWriter,
    preparation: Preparation,
    backend: GroupingBackend,
    memory_bytes: int,
    user_map: str | os.PathLike[str] | None,
    earlier: Path | None,
    progress: Progress,
) -> PreparedStore:
    """Run the five steps that the module docstring lists. The arguments are those of `build_store`, already checked."""
    work, with_map = writer.partial / "work", user_map is not None
    _begin_or_resume(work, sources, [preparation, type(backend).__name__, duckdb.__version__, with_map])
    # 1. Convert.
    readable: list[Source] = []
    for number, source in enumerate(sources):
        is_readable = not source.needs_conversion
        readable += [source] if is_readable else convert_source(source, number, work, preparation.fields)
    # 2. Scan.
    grouping = Grouping(
        work=work,
        fields=preparation.fields,
        shards=preparation.shards or choose_shards(readable),
        excluded=preparation.excluded,
        duplicate_chars=preparation.duplicate_chars,
        drop_duplicates=preparation.drop_duplicates,
        memory_bytes=memory_bytes,
    )
    _check_shards(work, grouping)
    logger.info("reading the input")
    rows = backend.scan(grouping, make_batches(readable), progress)
    if not rows["kept"]:
        raise InputError(_no_usable_row(rows, grouping.warnings()))
    counts: dict[str, Any] = {
        "inputs": [{"path": source.path, "bytes": size} for source, size, _ in _file_states(sources)],
        "rows": dict(sorted(rows.items())),
        "noticed": grouping.warnings(),
        "duplicate_posts": backend.find_duplicates(grouping),
    }
    # 3. Build the vocabulary.
    releases = ReleaseLog(folder=writer.partial, request=_release_request(sources, preparation))
    text = GroupedText(
        tokenizer=preparation.tokenizer,
        encoding=preparation.encoding,
        splits=preparation.splits,
        backend=backend,
        grouping=grouping,
        progress=progress,
        releases=releases,
    )
    if isinstance(preparation.tokenizer, WordTokenizer):
        _check_has_spaces(grouping)
    if preparation.canaries:  # checked before a private vocabulary is drawn and charged
        check_canary_words(preparation.canaries, preparation.tokenizer, vocabulary=None)
    result = preparation.vocabulary.build(text)
    if preparation.canaries:  # checked before the encoding, which may take hours
        check_canary_words(preparation.canaries, preparation.tokenizer, result.vocabulary)
    # DP: the store pays for every draw on its users, also for those of calls that failed or had other choices.
    events = [*result.events, *releases.events()]
    if draws := [*result.provenance.get("draws", []), *releases.draws()]:
        result = replace(result, provenance={**result.provenance, "draws": draws})
    logger.info("vocabulary: %d words (%s)", len(result.vocabulary), type(preparation.vocabulary).__name__)
    # 4. Encode.
    task = EncodeShard(
        folder=writer.partial,
        tokenizer=preparation.tokenizer,
        vocabulary=result.vocabulary,
        options=preparation.encoding,
        splits=preparation.splits,
        user_ids=work / "names" if with_map else None,
    )
    counts["users"] = _encode_shards(backend, grouping, task, progress)
    if not counts["users"].get("train_users"):
        raise InputError(_no_user_left(preparation, counts["users"]))
    is_guessed = isinstance(preparation.vocabulary, PublicVocabulary) and unknown_rate(counts["users"]) > MANY_UNKNOWN
    language = likely_language(_sampled_posts(grouping)) if is_guessed else None
    # 5. Finish.
    if user_map is not None:
        write_user_map(Path(user_map), work, grouping.shards)
    # The next steps change finished shards, which cannot be repeated. Without the plan in `work`, a call after an
    # interruption starts from the beginning.
    storage.rename_folder(work, writer.partial / "gone")
    with ThreadPoolExecutor(1) as thread:
        deletion = thread.submit(shutil.rmtree, writer.partial / "gone")
        _finish_splits(preparation, result.vocabulary, writer.partial, grouping.shards)
        record = preparation.public_record(replace(result, events=events), writer.path.name)
        if earlier is not None:
            # DP: written before the store is at its path, so that no run can begin a ledger without the earlier
            # charges.
            from unheard.privacy.population_ledger import continue_ledger  # here, because it loads scipy

            continue_ledger(writer.partial, earlier)
        writer.describe(vocabulary=result.vocabulary, info=record, counts=counts, shards=grouping.shards)
        deletion.result()
    store = writer.publish()
    releases.clear(store.path)
    logger.info("the store at %s is complete", store.path)
    return PreparedStore(store=store, counts=counts, language=language)


def choose_shards(sources: Sequence[Source]) -> int:
    """Return the number of shards for an input.

    There is one shard per 64 MiB of text up to 64 shards, and one per GiB for more than 64 GiB of text, up to 1,024
    shards. Small shards are sorted in memory. A number above four is rounded up to a multiple of four, so that two or
    four processes finish their last shards at about the same time.
    """
    total = sum(s.text_bytes for s in sources)
    shards = max(1, min(math.ceil(total / _SHARD_BYTES), 64), min(math.ceil(total / (1 << 30)), 1024))
    return shards if shards <= 4 else 4 * math.ceil(shards / 4)


def _begin_or_resume(work: Path, sources: Sequence[Source], choices: list[Any]) -> None:
    """Prepare the work folder: keep the files of an interrupted call with the same input and choices, delete others.

    Raises:
        CorpusError: An older version has drawn a private vocabulary here without a record of its cost.
    """
    request = repr([*choices, version("unheard"), _file_states(sources)])
    plan = {"question": hashlib.sha256(request.encode("utf-8", "surrogatepass")).hexdigest()}
    file = work / "plan.json"
    if not file.is_file() or read_work_file(file, dict) != plan:
        if (work / "vocabulary.txt").is_file():
            raise CorpusError(
                f"{work.parent} was begun by an older version, which has drawn a private vocabulary and has not "
                "recorded its cost. Finish it with that version, or delete the folder and count that release yourself."
            )
        _delete_files(work.parent)
        (work / "streams").mkdir(parents=True)
        (work / "names").mkdir()
        storage.replace_file(file, json.dumps(plan).encode())


def _check_shards(work: Path, grouping: Grouping) -> None:
    """Record the number of shards before the first row is written.

    Raises:
        CorpusError: The rows in the work folder were divided into another number of shards.
    """
    file = work / "shards.json"
    if not file.is_file() and not grouping.rows.exists():
        storage.replace_file(file, json.dumps([grouping.shards]).encode())
    # DP: rows of one user in two shards would be two users. The rule of `choose_shards` may differ between versions.
    if read_work_file(file, list) != [grouping.shards]:
        raise CorpusError(
            f"{work.parent} was begun by a version that divides the users in another way. Delete its folder `work` (words "
            "that were drawn for a private vocabulary are outside this folder and are kept), then run the same command again."
        )


def _delete_files(partial: Path) -> None:
    """Delete the files of an unfinished store, except for private vocabularies and the log of their costs."""
    for old in partial.iterdir():
        # DP: what was drawn stays, with its cost: a second draw would be a second release.
        if old.name == "releases.jsonl" or old.name.startswith("released-"):
            continue
        shutil.rmtree(old) if old.is_dir() else old.unlink()


def _release_request(sources: Sequence[Source], preparation: Preparation) -> str:
    """Return a hash of the input and of all choices that change the votes or the mechanism of a private vocabulary.

    A vocabulary that was drawn for the same request is used again without a new charge.
    """
    chosen = preparation
    choices = [chosen.fields, chosen.tokenizer, chosen.vocabulary, chosen.encoding, chosen.splits, chosen.excluded]
    choices += [chosen.drop_duplicates, chosen.duplicate_chars, _file_states(sources)]
    return hashlib.sha256(repr(choices).encode("utf-8", "surrogatepass")).hexdigest()


def _encode_shards(
    backend: GroupingBackend, grouping: Grouping, task: EncodeShard, progress: Progress
) -> dict[str, int]:
    """Run the task on every shard without a file of counts, and return the counts summed over all shards."""

    def result_file(shard: int) -> Path:
        """Return the path of the file with the counts of a shard. It exists when the shard is finished."""
        return grouping.work / "streams" / f"{shard:05d}.json"

    waiting = [s for s in range(grouping.shards) if not result_file(s).is_file()]
    done = grouping.shards - len(waiting)
    progress("Writing", done / grouping.shards)
    for shard, result in backend.over_shards(grouping, task, waiting):
        storage.replace_file(result_file(shard), json.dumps(result).encode())
        done += 1
        progress("Writing", done / grouping.shards)
    total: Counter[str] = Counter()
    for shard in range(grouping.shards):
        total.update(read_work_file(result_file(shard), dict))
    return dict(sorted(total.items()))


def _finish_splits(preparation: Preparation, vocabulary: Vocabulary, partial: Path, shards: int) -> None:
    """Plant the canaries in the text of training users, and draw the test posts from held-out users."""
    if preparation.canaries:
        record = plant_canaries(
            preparation.canaries,
            partial / "train",
            shards,
            tokenizer=preparation.tokenizer,
            vocabulary=vocabulary,
            tokens_per_user=preparation.encoding.tokens_per_user,
            salt=preparation.splits.salt,
        )
        write_private_json(partial / "canaries.json", record)
    if preparation.test_tokens:
        dtype = token_dtype(len(vocabulary))
        files = [partial / "held_out" / f"{s:05d}.offsets" for s in range(shards)]
        held_out = UserTokens([Shard.open(file, dtype) for file in files], dtype)
        posts = held_out.random_posts(preparation.test_tokens, preparation.splits.salt)
        write_shard(partial / "test_posts", 0, posts, dtype)


def check_user_map(path: Path, out: Path) -> None:
    """Check that the map can be written and lies outside the store. `prepare` calls this before it reads text.

    Args:
        path: The file of the map.
        out: The folder of the store.

    Raises:
        InputError: The suffix is not in `USER_MAP_FORMATS`, or the folder does not exist.
        PrivacyError: The file would be in the store.
    """
    if path.suffix.lower() not in USER_MAP_FORMATS:
        raise InputError(f"--user-map {path}: its name must end in {', '.join(USER_MAP_FORMATS)}, which is the format.")
    if path.resolve().is_relative_to(out.resolve()):
        raise PrivacyError(f"--user-map {path} lies in the store, which holds no ids. Name a file outside {out}.")
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise InputError(f"--user-map {path} is not a file in a folder that is there: make the folder first.")


def write_user_map(path: Path, work: Path, shards: int) -> None:
    """Write the number of each user id to a file that only its owner can read.

    Args:
        path: The file, which `check_user_map` has accepted.
        work: The work folder of the pipeline; `names` in it has the ids of the written users by shard.
        shards: The number of shards.
    """
    entries: list[dict[str, Any]] = []
    numbers: Counter[str] = Counter()
    for shard in range(shards):
        for split, users in read_work_file(work / "names" / f"{shard:05d}.json", dict).items():
            entries += [{"split": split, "number": numbers[split] + i, "user": user} for i, user in enumerate(users)]
            numbers[split] += len(users)
    lines, table = work / "user_map.jsonl", work / "user_map.written"
    lines.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    columns = "{split: 'VARCHAR', number: 'BIGINT', user: 'VARCHAR'}"
    rows = f"SELECT * FROM read_json({quoted(str(lines))}, format = 'newline_delimited', columns = {columns})"
    with open_database(1 << 28, 1, str(work / "temp")) as database:
        database.execute(f"COPY ({rows}) TO {quoted(str(table))} ({USER_MAP_FORMATS[path.suffix.lower()]})")
    path.unlink(missing_ok=True)
    storage.create_file(path, table.read_bytes())


def _check_has_spaces(grouping: Grouping) -> None:
    """Raise `InputError` if most of the text is in a script that does not separate words by spaces."""
    posts = _sampled_posts(grouping)
    if unspaced_share(posts) > 0.5:
        language = likely_language(posts)
        vocabulary = f"--vocab-language {language}" if language in ("ja", "zh") else "a list of them, --vocab FILE"
        raise InputError(
            "Most of the text is in a script without spaces between words (such as Chinese, Japanese, Thai): --tokens "
            f"words would take whole clauses for words. Use --tokens characters with {vocabulary}, or --tokens FILE with "
            "the tokenizer.json of a model for the language, or put spaces between the words."
        )


def _sampled_posts(grouping: Grouping) -> list[str]:
    """Return the first 2,000 characters of up to 1,000 posts, from the first shard that is not empty."""
    files = next((files for shard in range(grouping.shards) if (files := grouping.shard_files(shard))), [])
    with open_database(grouping.memory_bytes, 1, str(grouping.work / "temp")) as database:
        rows = database.execute(f"SELECT left(text, 2000) FROM read_parquet({sql_list(files)}) LIMIT {_SAMPLED_POSTS}")
        return [row[0] for row in rows.fetchall()]


def _no_usable_row(rows: Counter[str], warnings: Sequence[str]) -> str:
    """Return the error message for an input without any usable row, with the most likely remedy."""
    problems = ", ".join(f"{rows[k]} {k.replace('_', ' ')}" for k in ("malformed", "no_user", "no_text", "excluded"))
    if not rows["rows"]:
        remedy = "It is empty."
    elif rows["malformed"] == rows["rows"]:
        remedy = (
            "Check that it is UTF-8, and what its name or --format says it is "
            "(a JSON array is .json, its lines .jsonl)."
        )
    else:
        remedy = "Check --user-field and --text-field."
    return " ".join([f"No usable row in the input: {problems}. {remedy}", *warnings])


def _no_user_left(preparation: Preparation, users: dict[str, int]) -> str:
    """Return the error message for a store without training users: all are too short, held out or public."""
    if users.get("users_seen") == users.get("users_too_short"):
        least = preparation.encoding.min_tokens
        return f"No user has {least} tokens or more: lower --min-tokens or --tokens-per-user."
    return "No user is left to train on: all are held out or public. Lower --held-out or --public."


def _file_states(sources: Sequence[Source]) -> list[tuple[Source, int, int]]:
    """Return (source, size in bytes, modification time in ns) for each source. Both are 0 if it is not a file."""
    states = []
    for source in sources:
        state = os.stat(source.path) if os.path.isfile(source.path) else None
        states.append((source, state.st_size if state else 0, state.st_mtime_ns if state else 0))
    return states
