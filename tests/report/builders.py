"""Runs for the tests of reports: two small real runs, trained in a second or two, and records with invented figures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import unheard
from unheard.cli.evaluate import full_measures_of
from unheard.privacy.ledger import Entry
from unheard.report.run_record import RunRecord

ROUNDS = 12


def make_runs(run: unheard.Run, out: Path) -> list[Path]:
    """Train and measure `plain` (no privacy) and `private` in a folder, evaluated every other round."""
    plain = replace(
        run.plan,
        sampling=unheard.FixedSizeSampling(users_per_round=6),
        clip=unheard.NoClip(),
        estimator=unheard.TrueAverage(),
        noise=unheard.NoNoise(),
    )
    folders = []
    for name, plan in (("plain", plain), ("private", run.plan)):
        configured = replace(
            run,
            plan=plan,
            training=unheard.Training(rounds=ROUNDS, checkpoint_every=6),
            evaluation=unheard.Evaluation(every=2, max_tokens=400, unroll=20),
        )
        for _ in unheard.train(configured, out / name, allow_no_privacy=True):
            pass
        full_measures_of(out / name, prompts=["w1 w2", "w7"])
        folders.append(out / name)
    return folders


def made_up_record(
    name: str, accuracies: list[float], *, every=20, users_per_round=100.0, population=763_430, events=(), delta=1e-9
) -> RunRecord:
    """Return a record with these accuracies, one every `every` rounds, and these charged events."""
    metrics = [{"round": every * (i + 1), "accuracy_top1": a} for i, a in enumerate(accuracies)]
    entries = [Entry(event=event, round=i, hash="") for i, event in enumerate(events)]
    facts = {"population": population, "delta": delta, "sampling": {"users_per_round": users_per_round}}
    return RunRecord(name=name, tables={"training": {}}, facts=facts, entries=entries, metrics=metrics)


def with_statement(record: RunRecord, statement: dict[str, Any]) -> RunRecord:
    """Return a copy of a record with another privacy statement than that of its ledger."""
    copy = replace(record)
    copy.__dict__["statement"] = statement
    return copy
