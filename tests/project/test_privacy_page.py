"""Checks the references of docs/privacy.md: each quoted comment is in its file, each named test exists, none is missing.

A reference is one line of the page: → `file.py` “quoted words of the comment” · `test_name`, `test_name`. It may continue
on lines that begin with two spaces.
"""

import re
import sys
from pathlib import Path

import unheard

ROOT = Path(__file__).parents[2]
SRC = Path(unheard.__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

import site_hooks  # noqa: E402  # pyright: ignore[reportMissingImports]

PAGE = site_hooks.joined_references((ROOT / "docs" / "privacy.md").read_text())
CLAIMS = re.findall(r"^→ `([\w/]+\.py)` “([^”]+)” · (.+)$", PAGE, re.MULTILINE)
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))


def dp_comments(path: Path) -> list[str]:
    """Return each `# DP:` comment of a file, with its continuation lines joined to it."""
    comments, lines = [], path.read_text().splitlines()
    for i, line in enumerate(lines):
        if "# DP:" not in line:
            continue
        words = [line.split("# DP:", 1)[1].strip()]
        for more in lines[i + 1 :]:
            if not re.match(r"\s*# ", more) or "# DP:" in more:
                break
            words.append(more.strip().removeprefix("#").strip())
        comments.append(" ".join(words))
    return comments


def test_the_page_has_references():
    assert len(CLAIMS) > 25
    assert len(re.findall(r"^→", PAGE, re.MULTILINE)) == len(CLAIMS)  # no line with an arrow is malformed


def test_every_quoted_comment_is_in_its_file():
    missing = [
        f"{file} has no '# DP: ... {sentence} ...'"
        for file, sentence, _ in CLAIMS
        if not any(sentence in comment for comment in dp_comments(SRC / file))
    ]
    assert missing == []


def test_every_reference_names_a_test():
    assert [f"{file}: {sentence}" for file, sentence, tests in CLAIMS if not re.search(r"`test_\w+`", tests)] == []


def test_every_test_named_on_the_page_exists():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert [name for name in named if f"def {name}(" not in TESTS] == []


def test_every_dp_comment_is_on_the_page():
    quoted = {file: [sentence for other, sentence, _ in CLAIMS if other == file] for file, _, _ in CLAIMS}
    missing = [
        f"{path.relative_to(SRC).as_posix()}: {comment}"
        for path in sorted(SRC.rglob("*.py"))
        for comment in dp_comments(path)
        if not any(sentence in comment for sentence in quoted.get(path.relative_to(SRC).as_posix(), []))
    ]
    assert missing == [], "add a line → `file.py` “words of the comment” · `test_name` to docs/privacy.md"
