"""Build the corpora of the reproduction from clones of their public sources.

    git clone https://github.com/muhwagua/color-bert
    python -m reproduction.build_corpora blogs_1600 --clone color-bert --out corpora/blogs_1600.jsonl.gz
    python -m reproduction.build_corpora scotus_1600 --clone supreme_court_transcripts --out corpora/scotus_1600.jsonl.gz
    python -m reproduction.build_corpora reviews_81 --clone hotels --out corpora/reviews_81.jsonl.gz

The input is a git clone (a bare one is enough). The output is JSON lines with the fields `user`, `time` and `text`, one
post, turn or review per line, in time order within a user. The command prints the SHA-256 of the lines and compares it
with the digest that is registered in `CORPORA`, so that anybody can check that they built the same text.

Every rule is deterministic. The output has numbers instead of the names of users.
"""

import argparse
import calendar
import collections
import contextlib
import dataclasses
import datetime
import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SPACES = re.compile(r"\s+")
LARGEST_FILE = 4 * 2**20
"""Largest size of a source file in bytes. Larger files, those of the hotels with the most reviews, are left out."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a corpus comes from and what is built from it.

    Attributes:
        repository: The GitHub repository, as owner/name.
        commit: The commit that is read.
        folder: Folder inside the repository.
        suffix: Regular expression; a file is read if it occurs in the file's path.
        licence: The licence of the text.
        left_out: What the rules leave out, in words.
        sha256: Digest of the lines of the corpus, or an empty string if none is registered.
        rows: Function that takes the path and content of each file and yields the rows of the corpus.
    """

    repository: str
    commit: str
    folder: str
    suffix: str
    licence: str
    left_out: str
    sha256: str
    rows: Callable[[Iterator[tuple[str, bytes]]], Iterable[Row]]


# --------------------------------------------------------------------------------------------------------------------- git


def files(clone: Path, source: Source) -> Iterator[tuple[str, bytes]]:
    """Read the files of a source from a clone.

    Args:
        clone: Folder of the clone.
        source: The source.

    Yields:
        Path and content of each file, sorted by path. Files above 4 MiB are left out, and so are files that the clone
        lists but does not hold.
    """
    git = ["git", "-C", str(clone)]
    listed = subprocess.run([*git, "ls-tree", "-r", source.commit, source.folder], capture_output=True, check=True)
    entries = [line.split("\t") for line in listed.stdout.decode().splitlines()]
    named = sorted((path, entry.split()[2]) for entry, path in entries if re.search(source.suffix, path))
    with subprocess.Popen([*git, "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for number, (path, blob) in enumerate(named, 1):
            reader.stdin.write(blob.encode() + b"\n")
            reader.stdin.flush()
            header = reader.stdout.readline().split()
            if header[1] == b"missing":
                continue
            content = reader.stdout.read(int(header[2]))
            reader.stdout.read(1)
            if len(content) > LARGEST_FILE:
                continue
            if number % 2000 == 0 or number == len(named):
                print(f"{number:,} of {len(named):,} files", file=sys.stderr, flush=True)
            yield path, content
        reader.stdin.close()


# ------------------------------------------------------------------------------------------------------------------- cutting


def first_words(rows: Iterable[Row], words: int) -> Iterator[Row]:
    """Yield the rows of one user up to `words` words in total. The last row is cut if it exceeds the total.

    Args:
        rows: The rows of one user, in order.
        words: The largest number of words in total.
    """
    left = words
    for row in rows:
        if left <= 0:
            return
        ends = [match.end() for match in re.finditer(r"\S+", row["text"])]
        if len(ends) > left:
            row = row | {"text": row["text"][: ends[left - 1]]}
        left -= min(left, len(ends))
        yield row


# --------------------------------------------------------------------------------------------------------------------- blogs

POST = re.compile(r"<date>(.*?)</date>\s*<post>(.*?)</post>", re.DOTALL)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
ENGLISH = frozenset(
    """the a an and or but of to in on at for with from is are was were be been am it its this that i you he she we they my
    your his her our me him them so not have has had do did don't it's i'm just as if all what when there will would can
    could about up out no get got one like really then than who how because by more some know time now""".split()  # noqa: SIM905
)
"""Frequent English words: a post of ten or more words of which fewer than 15 % are in this list is left out."""


def blog_date(text: str) -> str | None:
    """Return a date such as `14,May,2004` as `2004-05-14`; None if the text is not a date with an English month."""
    parts = [part.strip() for part in text.split(",")]
    try:
        return f"{int(parts[2]):04d}-{calendar.month_name[1:].index(parts[1]) + 1:02d}-{int(parts[0]):02d}"
    except (IndexError, ValueError):
        return None


def is_english(words: list[str]) -> bool:
    """Whether a post has fewer than ten words, or enough frequent English words (see `ENGLISH`)."""
    frequent = sum(word.lower().strip('.,!?";:()') in ENGLISH for word in words)
    return len(words) < 10 or frequent >= 0.15 * len(words)


def blogs(sources: Iterator[tuple[str, bytes]]) -> Iterator[Row]:
    """Yield the first 1,600 words of each blogger who has at least 1,600.

    A post of 20 or more words is left out if an earlier blogger has the same post, so that users do not share texts.
    """
    owners: dict[bytes, int] = {}
    for user, (_, content) in enumerate(sources):
        try:
            page = content.decode("utf-8")
        except UnicodeDecodeError:
            page = content.decode("cp1252", "replace")
        posts = []
        for date, raw in POST.findall(page):
            text = html.unescape(html.unescape(raw)).replace("urlLink", " ").replace("\ufffd", "'")
            text = SPACES.sub(" ", CONTROL.sub(" ", text)).strip()
            words = text.split()
            if not words or not is_english(words):
                continue
            if len(words) >= 20 and owners.setdefault(hashlib.md5(text.encode()).digest(), user) != user:
                continue
            posts.append({"user": user, "time": blog_date(date), "text": text})
        posts.sort(key=lambda row: row["time"] or "")
        if sum(len(row["text"].split()) for row in posts) >= 1600:
            yield from first_words(posts, 1600)


# -------------------------------------------------------------------------------------------------------------------- scotus


def is_justice(speaker: Row) -> bool:
    """Whether a speaker has the role of a justice."""
    roles = speaker.get("roles")
    return isinstance(roles, list) and any(
        isinstance(role, dict) and role.get("type") == "scotus_justice" for role in roles
    )


def scotus(sources: Iterator[tuple[str, bytes]]) -> Iterator[Row]:
    """Yield the first 1,600 words of each speaker at the US Supreme Court, except justices, who has at least 1,600."""
    turns: dict[str, list[Row]] = collections.defaultdict(list)
    for path, content in sources:
        try:
            hearing = json.loads(content)
        except json.JSONDecodeError:
            continue
        for section in (hearing.get("transcript") or {}).get("sections") or []:
            for turn in section.get("turns") or []:
                speaker = turn.get("speaker") or {}
                blocks = " ".join(block.get("text") or "" for block in turn.get("text_blocks") or [])
                text = SPACES.sub(" ", blocks).strip()
                if text and speaker.get("identifier") and not is_justice(speaker):
                    year = path.rsplit("/", 1)[-1][:4]
                    turns[speaker["identifier"]].append({"user": 0, "time": year, "text": text})
    enough = [rows for rows in turns.values() if sum(len(row["text"].split()) for row in rows) >= 1600]
    for user, rows in enumerate(enough):
        yield from (row | {"user": user} for row in first_words(rows, 1600))


# ------------------------------------------------------------------------------------------------------------------- reviews

MARKUP = re.compile(r"<[^>]{1,80}>")
MORE = re.compile(r"\s*(?:\.\.\.)?\s*(?:More\s*)?showReview\([^)]*\);?\s*|\s*More\s*$")
HIDDEN = (
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "<email>"),
    (re.compile(r"(?:https?://|www\.)\S+|\b[\w-]+\.(?:com|net|org|co\.uk|info)(?:/\S*)?\b", re.IGNORECASE), "<url>"),
    (re.compile(r"(?<!\w)@\w+"), "<user>"),
    (re.compile(r"(?<!\w)\+?\(?\d[\d\s().-]{7,}\d(?!\w)"), "<phone>"),
)
"""Patterns of addresses, user names and telephone numbers, each with the text that replaces it."""
UNNAMED = {"", "a tripadvisor member", "lass=", "tripadvisor member", "anonymous"}


def review_text(raw: str) -> str:
    """Return the text of a review without markup, and with placeholders for addresses and telephone numbers."""
    text = MORE.sub(" ", MARKUP.sub(" ", html.unescape(raw)))
    for pattern, name in HIDDEN:
        text = pattern.sub(name, text)
    return SPACES.sub(" ", text).strip()


def review_date(text: str) -> str:
    """Return a date such as `May 14, 2004` as `2004-05-14`; an empty string if the text is not a date."""
    for form in ("%B %d, %Y", "%b %d, %Y", "%Y-%m-%d"):
        try:
            return datetime.datetime.strptime(text.strip(), form).strftime("%Y-%m-%d")
        except ValueError:
            continue
    return ""


def reviews(words: int, users: int | None = None) -> Callable[[Iterator[tuple[str, bytes]]], Iterator[Row]]:
    """Return a function that yields the first words of each reviewer of hotels.

    A reviewer is identified by the name of the author; if the name contains a space, by the name and the stated town.
    Users are numbered in the order of a hash of this identity.

    Args:
        words: The largest number of words of one reviewer.
        users: The number of reviewers; None for all.
    """

    def rows(sources: Iterator[tuple[str, bytes]]) -> Iterator[Row]:
        """Read the files of all hotels and yield the rows of the chosen reviewers."""
        seen: set[str] = set()
        by_user: dict[bytes, list[tuple[str, str]]] = collections.defaultdict(list)
        for _, content in sources:
            try:
                listed = json.loads(content).get("Reviews", [])
            except json.JSONDecodeError:
                continue
            for review in listed:
                author = (review.get("Author") or "").strip()
                text, title = review_text(review.get("Content") or ""), review_text(review.get("Title") or "")
                title = title.strip("\u201c\u201d\"' ")
                if author.lower() in UNNAMED or len(text.split()) < 3:
                    continue
                if title and not text.lower().startswith(title.rstrip(". \u2026").lower()):
                    text = f"{title}\n{text}"
                key = f"{author}|{(review.get('AuthorLocation') or '').strip()}" if " " in author else author
                identity = review.get("ReviewID") or hashlib.md5((key + text).encode()).hexdigest()
                dated = (review_date(review.get("Date") or ""), text)
                user = hashlib.sha256(f"unheard reviews {key}".encode()).digest()[:16]
                if identity not in seen and dated[1] not in (other for _, other in by_user[user]):
                    by_user[user].append(dated)
                seen.add(identity)
        for user, key in enumerate(sorted(by_user)[:users]):
            dated_rows = ({"user": user, "time": date, "text": text} for date, text in sorted(by_user[key]))
            yield from first_words(dated_rows, words)

    return rows


# -------------------------------------------------------------------------------------------------------------------- corpora

READERS = {"blogs_1600": blogs, "scotus_1600": scotus, "reviews_81": reviews(64)}
CORPORA: dict[str, Source] = {
    name: Source(**facts, rows=READERS[name])
    for name, facts in tomllib.loads(Path(__file__).with_name("sources.toml").read_text(encoding="utf-8")).items()
}
"""The source of each corpus, by the name of the corpus."""
CORPORA["reviews_1600_200k"] = dataclasses.replace(
    CORPORA["reviews_81"],
    rows=reviews(1600, 200_000),
    sha256="21a97abd37578e58a4b650504476e797c89afad592472b73f98dd2c7a2d26204",
)


def build(name: str, clone: Path, out: Path) -> str:
    """Build one corpus.

    Args:
        name: A name of `CORPORA`.
        clone: Folder of a clone of its repository.
        out: File to write; `.gz` compresses it. An existing file is not replaced.

    Returns:
        SHA-256 of the lines.

    Raises:
        SystemExit: The clone does not hold the commit, `out` exists, or the lines differ from the registered ones (the
            file is written all the same in this case).
    """
    source = CORPORA[name]
    found = subprocess.run(["git", "-C", str(clone), "cat-file", "-e", source.commit], capture_output=True)
    if found.returncode:
        raise SystemExit(f"{clone} does not hold commit {source.commit} of github.com/{source.repository}: clone that.")
    digest, users, count = hashlib.sha256(), set(), 0
    if out.exists():
        raise SystemExit(f"{out} exists: name another file or remove it.")
    partial = out.with_name(out.name + ".partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(open(partial, "wb"))
        if out.suffix == ".gz":  # no name and no time in the header, so that every build has the same bytes
            file = stack.enter_context(gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0))
        for row in source.rows(files(clone, source)):
            line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
            digest.update(line)
            users.add(row["user"])
            count += 1
            file.write(line)
    partial.rename(out)
    print(f"{name}: {len(users):,} users, {count:,} rows. Left out: {source.left_out}. Licence: {source.licence}.")
    print(f"SHA-256 of the lines: {digest.hexdigest()}")
    if source.sha256 and digest.hexdigest() != source.sha256:
        raise SystemExit(f"These are not the registered lines ({source.sha256}). Is the clone complete?")
    return digest.hexdigest()


def main() -> None:
    """Run the command line of this module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CORPORA)
    parser.add_argument("--clone", type=Path, required=True, help="clone of the repository of the source")
    parser.add_argument("--out", type=Path, required=True, help="file to write: .jsonl or .jsonl.gz")
    arguments = parser.parse_args()
    build(arguments.name, arguments.clone, arguments.out)


if __name__ == "__main__":
    main()
