"""Render `rules.md` from `rules.toml`, the rules that were registered before the runs.

    python -m reproduction.render_rules

A test checks that the two files agree.
"""

import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE, TARGET = HERE / "rules.toml", HERE / "rules.md"
COUNTS = {"paper": "a conclusion of the paper", "expectation": "our own expectation, not counted"}
"""Whether a rule counts as a conclusion of the paper."""


def load(source: Path = SOURCE) -> dict[str, Any]:
    """The rules as plain tables."""
    return tomllib.loads(source.read_text(encoding="utf-8"))


def exposure(rule: dict[str, Any], population: int) -> tuple[float, float]:
    """Sampling probability q, and the mean number of rounds in which one user takes part."""
    q = rule["users_per_round"] / population
    return q, q * rule["rounds"]


def render(rules: dict[str, Any]) -> str:
    """The text of `rules.md`."""
    about, terms, vectors = rules["about"], rules["terms"], rules["word_vectors"]
    populations = {corpus["name"]: corpus["population"] for corpus in rules["corpus"]}
    paper = [rule for rule in rules["rule"] if rule["counts"] == "paper"]
    own = [rule for rule in rules["rule"] if rule["counts"] == "expectation"]
    lines = [
        f"# {about['title']}",
        "",
        "Generated from `rules.toml` by `python -m reproduction.render_rules`. Do not edit.",
        "",
        f"Registered {about['registered']}. {about['paper']}. {about['purpose']}",
        "",
        f"{about['counting']} There are {len(paper)} rules of the first kind and {len(own)} of the second.",
        "",
        "## What was seen before the rules were written",
        "",
        *_bullets(about["seen_before"]),
        "",
        "## Corrections to earlier texts",
        "",
        *_bullets(about["corrections"]),
        "",
        "## Terms",
        "",
        f"- **Accuracy.** {terms['accuracy']}",
        f"- **Difference.** {terms['difference']}",
        f"- **Interval.** {terms['interval']}",
        f"- **Nearly**: {terms['nearly']:g} points. {terms['nearly_reason']}",
        f"- **Small**: {terms['small']:g} points. {terms['small_reason']}",
        f"- **Single-seed margin**: {terms['single_seed_margin']:g} points. {terms['single_seed_margin_reason']}",
        f"- **Outcomes**: {', '.join(terms['outcomes'])}.",
        f"- **Also reported.** {terms['also_reported']}",
        f"- **Clean runs.** {terms['clean']}",
        "",
        'The outcome is "cannot tell" in these common cases:',
        "",
        *_bullets(terms["cannot_tell"]),
        "",
        "## Word vectors of norm 1",
        "",
        f"> {vectors['sentence']} ({vectors['where']})",
        "",
        *_bullets(vectors["chronology"]),
        "",
        f"{vectors['units']}",
        "",
        f"The runs use: **{vectors['used']}**. {vectors['why']}",
        "",
        "## Corpora",
        "",
        "| corpus | text | declared population | held-out users |",
        "| --- | --- | ---: | ---: |",
        *(
            f"| {corpus['name']} | {corpus['text']} | {corpus['population']:,} | {corpus['held_out_users']:,} |"
            for corpus in rules["corpus"]
        ),
        "",
    ]
    for corpus in rules["corpus"]:
        lines += [f"**{corpus['name']}**: {corpus['note']}", "", f"    {corpus['prepare']}", ""]
    lines += ["## Summary", "", "| rule | exhibit | corpus | C | rounds | q | visits per user | seeds | threshold |"]
    lines += ["| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for rule in rules["rule"]:
        q, visits, users, rounds = _exposure_text(rule, populations)
        lines.append(
            f"| [{rule['id']}](#{rule['id']}) | {rule['exhibit']} | {rule['corpus']} | {users} | {rounds} | {q} | "
            f"{visits} "
            f"| {rule['seeds'] or '—'} | {rule['threshold']:g} {rule['unit']} |"
        )
    for title, group in (("Conclusions of the paper", paper), ("Our own expectations", own)):
        lines += ["", f"## {title}"]
        for rule in group:
            lines += _rule(rule, populations)
    lines += ["", "## Amendments", ""]
    lines += [f"- {change['date']}, {change['rule']}: {change['text']}" for change in rules.get("amendment", [])] or [
        "None."
    ]
    return "\n".join(lines) + "\n"


def _rule(rule: dict[str, Any], populations: dict[str, int]) -> list[str]:
    """The section of one rule."""
    q, visits, users, rounds = _exposure_text(rule, populations)
    read_at = ", ".join(f"{mark:,}" for mark in rule["read_at"]) or "—"
    return [
        "",
        f"### {rule['id']}",
        "",
        f"> {rule['sentence']} ({rule['where']})",
        "",
        f"- **Kind**: {COUNTS[rule['counts']]}; {rule['exhibit']}.",
        f"- **Corpus**: {rule['corpus']}. Users per round {users}, rounds {rounds}, q {q}, visits per user {visits}.",
        f"- **Runs**: {'; '.join(rule['runs'])}.",
        f"- **Measure**: {rule['measure']}",
        f"- **Read at round**: {read_at}. **Seeds**: {rule['seeds'] or '—'}.",
        f"- **Threshold**: {rule['threshold']:g} {rule['unit']}. {rule['threshold_reason']}",
        f"- **Held**: {rule['holds']}",
        f"- **Did not hold**: {rule['fails']}",
        f"- **Cannot tell**: {rule['cannot_tell']}",
        f"- **Earlier verdict**: growing vectors: {rule['old_growing']} Projected after every round: "
        f"{rule['old_projected']}",
        f"- **Changed**: {rule['changed']}",
    ]


def _exposure_text(rule: dict[str, Any], populations: dict[str, int]) -> tuple[str, str, str, str]:
    """q, visits per user, users per round and rounds in print; dashes for rules without training."""
    if rule["corpus"] == "none":
        return "—", "—", "—", "—"
    q, visits = exposure(rule, populations[rule["corpus"]])
    return f"{q:.2e}", f"{visits:.2f}", f"{rule['users_per_round']:,}", f"{rule['rounds']:,}"


def _bullets(texts: list[str]) -> list[str]:
    """A list in Markdown."""
    return [f"- {text}" for text in texts]


if __name__ == "__main__":
    TARGET.write_text(render(load()), encoding="utf-8")
