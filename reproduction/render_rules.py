"""Read `rules.toml`, the rules that were registered before the runs, and render it as `rules.md`.

    python -m reproduction.render_rules

A test checks that the two files agree.
"""

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from unheard.formatting import text_templates

HERE = Path(__file__).parent
SOURCE, TARGET = HERE / "rules.toml", HERE / "rules.md"
TEMPLATES = text_templates("reproduction")
"""Environment for templates of Markdown and JSON files. `unheard.report.page` renders HTML templates, with escaping."""


def load(source: Path = SOURCE) -> dict[str, Any]:
    """Return the registered rules as plain tables."""
    return tomllib.loads(source.read_text(encoding="utf-8"))


def render(rules: dict[str, Any]) -> str:
    """Return the text of `rules.md` for the tables of `rules.toml`."""
    populations = {corpus["name"]: corpus["population"] for corpus in rules["corpus"]}
    listed = [rule | {"sizes": _sizes(rule, populations)} for rule in rules["rule"]]
    kinds = {
        name: [rule for rule in listed if rule["counts"] == counts]
        for name, counts in (("paper", "paper"), ("own", "expectation"))
    }
    by_date = Counter(rule.get("added", rules["about"]["registered"]) for rule in listed)
    dates = [f"{number} were registered {date}" for date, number in sorted(by_date.items())]
    content = {"amendment": [], **rules, "rule": listed, **kinds, "counted_by_date": f"{', '.join(dates)}."}
    return TEMPLATES.get_template("rules.md").render(content)


def _sizes(rule: dict[str, Any], populations: dict[str, int]) -> dict[str, str]:
    """Return users per round, rounds, q and visits per user as text; dashes for rules that need no training."""
    if rule["corpus"] == "none":
        return dict.fromkeys(("users", "rounds", "q", "visits"), "—")
    users, rounds = rule["users_per_round"], rule["rounds"]
    q = users / populations[rule["corpus"]]
    return {"users": f"{users:,}", "rounds": f"{rounds:,}", "q": f"{q:.2e}", "visits": f"{q * rounds:.2f}"}


if __name__ == "__main__":
    TARGET.write_text(render(load()), encoding="utf-8")
