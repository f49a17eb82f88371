"""The scripts that build corpora from clones: each rule on a small repository, and refusals."""

import dataclasses
import gzip
import json
import subprocess

import pytest
from reproduction.build_corpora import CORPORA, blog_date, build, first_words, review_date, review_text

from reproduction import build_corpora

LONG = " ".join(f"the word {n}" for n in range(600))
"""1,800 words, a third of them frequent in English."""


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Create a git repository with files of all sources, and make `CORPORA` refer to it."""
    folder = tmp_path / "clone"
    pages = {
        "blogs/1.xml": f"<Blog><date>14,May,2004</date><post>{LONG}</post>"
        "<date>01,May,2004</date><post>urlLink first &amp;amp; shared words of a post "
        "that is in the blog of another person too so that it counts once</post></Blog>",
        "blogs/2.xml": f"<Blog><date>02,June,2004</date><post>again {LONG}</post>"
        "<date>01,June,2004</date><post>first &amp; shared words of a post "
        "that is in the blog of another person too so that it counts once</post></Blog>",
        "blogs/3.xml": "<Blog><date>02,June,2004</date><post>too short</post></Blog>",
        "oyez/cases/1999.12-34-t01.json": json.dumps(
            {
                "transcript": {
                    "sections": [
                        {
                            "turns": [
                                _turn("j", LONG, [{"type": "scotus_justice"}]),
                                _turn("lawyer", LONG, None),
                                _turn("lawyer", "beyond the limit", None),
                                {"speaker": None, "text_blocks": [{"text": LONG}]},
                            ]
                        }
                    ]
                }
            }
        ),
        "json/1.json": json.dumps(
            {
                "Reviews": [
                    _review("1", "ann", "We liked the room", "May 2, 2010", "Nice"),
                    _review("2", "ann", "Mail me at a.b@example.com or 555 123 4567 8", "May 1, 2010"),
                    _review("2", "ann", "The same number twice", "May 3, 2010"),
                    _review("3", "A TripAdvisor Member", "Nobody can be counted here", "May 1, 2010"),
                    _review("4", "Bob K", "In one town of two", "May 1, 2010", place="Here"),
                    _review("5", "Bob K", "In the other town", "May 1, 2010", place="There"),
                    _review("6", "cat", "too short", "May 1, 2010"),
                ]
            }
        ),
    }
    for name, text in pages.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    git = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Add text"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    for name, source in CORPORA.items():
        monkeypatch.setitem(CORPORA, name, dataclasses.replace(source, commit="HEAD", sha256=""))
    return folder


def _turn(identifier, text, roles):
    return {"speaker": {"identifier": identifier, "roles": roles}, "text_blocks": [{"text": text}]}


def _review(number, author, text, date, title="", place=""):
    return {
        "ReviewID": number,
        "Author": author,
        "AuthorLocation": place,
        "Content": text,
        "Date": date,
        "Title": title,
    }


def _rows(file):
    return [json.loads(line) for line in gzip.open(file, "rt", encoding="utf-8")]


def test_blogs_keep_1600_words_in_time_order_and_shared_posts_once(clone, tmp_path):
    build("blogs_1600", clone, tmp_path / "blogs.jsonl.gz")
    rows = _rows(tmp_path / "blogs.jsonl.gz")
    assert {row["user"] for row in rows} == {0, 1}, "a blogger below 1,600 words was kept"
    assert [row["time"] for row in rows] == ["2004-05-01", "2004-05-14", "2004-06-02"]
    assert rows[0]["text"].startswith("first & shared words")
    for user in (0, 1):
        assert sum(len(row["text"].split()) for row in rows if row["user"] == user) == 1600


def test_scotus_leaves_out_justices_and_unnamed_speakers(clone, tmp_path):
    build("scotus_1600", clone, tmp_path / "scotus.jsonl.gz")
    rows = _rows(tmp_path / "scotus.jsonl.gz")
    assert [(row["user"], row["time"], len(row["text"].split())) for row in rows] == [(0, "1999", 1600)]


def test_reviews_are_keyed_cleaned_and_deduplicated(clone, tmp_path):
    build("reviews_81", clone, tmp_path / "reviews.jsonl.gz")
    rows = _rows(tmp_path / "reviews.jsonl.gz")
    by_user = {}
    for row in rows:
        by_user.setdefault(row["user"], []).append(row["text"])
    assert sorted(by_user) == [0, 1, 2]
    assert sorted(by_user.values(), key=len)[-1] == ["Mail me at <email> or <phone>", "Nice\nWe liked the room"]
    assert "ann" not in (tmp_path / "reviews.jsonl.gz").read_text(errors="ignore")


def test_a_build_repeats_to_the_byte_and_a_wrong_digest_is_an_error(clone, tmp_path, monkeypatch):
    first = build("reviews_81", clone, tmp_path / "a.jsonl.gz")
    assert build("reviews_81", clone, tmp_path / "b.jsonl.gz") == first
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    monkeypatch.setitem(CORPORA, "reviews_81", dataclasses.replace(CORPORA["reviews_81"], sha256="0" * 64))
    with pytest.raises(SystemExit, match="not the registered lines"):
        build("reviews_81", clone, tmp_path / "c.jsonl.gz")


def test_an_existing_file_and_a_foreign_clone_are_refused(clone, tmp_path, monkeypatch):
    (tmp_path / "there.jsonl.gz").write_bytes(b"")
    with pytest.raises(SystemExit, match="exists"):
        build("blogs_1600", clone, tmp_path / "there.jsonl.gz")
    monkeypatch.setitem(CORPORA, "blogs_1600", dataclasses.replace(CORPORA["blogs_1600"], commit="0" * 40))
    with pytest.raises(SystemExit, match="does not hold commit"):
        build("blogs_1600", clone, tmp_path / "new.jsonl.gz")


def test_large_files_are_left_out(clone, tmp_path, monkeypatch):
    monkeypatch.setattr(build_corpora, "LARGEST_FILE", 10)
    build("scotus_1600", clone, tmp_path / "scotus.jsonl.gz")
    assert _rows(tmp_path / "scotus.jsonl.gz") == []


def test_dates_and_text_of_the_sources_are_parsed():
    assert blog_date("14,May,2004") == "2004-05-14"
    assert blog_date("14,mai,2004") is None
    assert review_date("Apr 3, 2009") == "2009-04-03"
    assert review_date("yesterday") == ""
    assert review_text("See <b>www.example.com</b> now showReview(12);") == "See <url> now"
    rows = list(first_words([{"text": "a  b\nc"}, {"text": "d"}], 2))
    assert rows == [{"text": "a  b"}]
