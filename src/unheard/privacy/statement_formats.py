"""Write a privacy statement in the formats that reviewers, registries and model cards ask for.

Input: a statement (`statement.py`) and, if there is one, the record of an audit (`audit.json`). Output: text.

    render(statement, "report")                        Markdown; `unheard card` includes it
    render(statement, "nist", audit=audit)             Markdown, by the levels of NIST's pyramid
    render(statement, "registry")                      JSON, an entry for the registry of deployments
    report_data(statement, audit=...)                  the values that the templates show, as plain JSON

report      The items that a paper or model card should report: setting and trust model, what the definition covers
            (data accesses, output, unit, adjacency), accounting and whether its assumptions hold, tuning, and how to
            verify. Ponomareva et al., "How to DP-fy ML" (2023), Section 5.3.3.
nist        The levels of the differential privacy pyramid: Near, Darais, Lefkovitz and Howarth, "Guidelines for
            Evaluating Differential Privacy Guarantees", NIST SP 800-226 (2025), Figure 1.
registry    The fields of the Differential Privacy Deployments Registry: schemas/deployments-schema.yaml of
            github.com/opendp/deployments-registry-data, commit 3e9c812. Some fields are known only to the curator. They
            say FILL IN, and the registry's own check refuses the entry until they are filled in.

Every number is computed from the statement, whose `composed` events are everything that was charged. The text is in the
Jinja2 templates of `templates/`. `markdown_line` removes control characters and markup from strings of a ledger.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment

from unheard.config import nearest
from unheard.errors import InvalidValue, RunFolderError
from unheard.formatting import text_templates
from unheard.privacy.accountants import ACCOUNTANTS
from unheard.privacy.events import Event, Selection, against_server, from_record
from unheard.privacy.statement import NOT_DECLARED, figure, render_text, rounded_up
from unheard.privacy.trade_off import Figures, figures, figures_of_pair
from unheard.run_folder import record_digest

FORMATS = ("text", "report", "registry", "nist")

SETTINGS = {
    "central": (
        "Central differential privacy with a trusted curator: the operator of training reads the text. The guarantee is about "
        "everybody who sees what is released.",
        "The operator of the training machine is trusted with the text, the memory and the disks, and to declare honest "
        "numbers. Readers of the model, other users and auditors are trusted with nothing.",
    ),
    "federated": (
        "Federated training with central differential privacy: the text stays on the users' nodes, and the server adds the "
        "noise. The guarantee is about everybody who sees what is released, except the server.",
        "The server is trusted with the clipped update of each user that it draws, to keep them secret, and to add the noise. "
        "Readers of the model, other users and auditors are trusted with nothing.",
    ),
    "secure aggregation": (
        "Federated training with secure aggregation and central differential privacy: the text stays on the users' nodes, and "
        "the server adds the noise. The guarantee is about everybody who sees what is released, except the server.",
        "The server is trusted to follow the protocol, with the sum of the updates of each round without noise and with who "
        "was drawn, to keep them secret, and to add the noise. Readers of the model, other users and auditors are trusted "
        "with nothing.",
    ),
    "distributed noise": (
        "Federated training with distributed differential privacy: the text stays on the users' nodes, which add the noise "
        "before secure aggregation. There are two guarantees: against readers of the models, and against the server.",
        "The server is trusted to follow the protocol, and for the claim against readers also to keep secret who was drawn. "
        "Against a server that knows who was drawn the larger epsilon holds. At least the declared number of nodes of each "
        "round must be honest. Readers of the model, other users and auditors are trusted with nothing.",
    ),
}
"""The setting and the trust model of each kind of run (docs/threat-model.md)."""
FILL_IN = "FILL IN"
NOT_CHECKED = "no software can check this"


def render(statement: Mapping[str, Any], format: str, *, audit: Mapping[str, Any] | None = None) -> str:
    """Render a statement in one of `FORMATS`.

    Args:
        statement: The statement of a run, from `statement()` or from `statement.json`.
        format: "text", "report", "registry" or "nist".
        audit: The record of an audit of the same run (`read_audit`), or None if there was none.

    Returns:
        Plain text for "text", Markdown for "report" and "nist", JSON for "registry".

    Raises:
        InvalidValue: There is no such format, or the format is "registry" and the run has no finite epsilon.
    """
    if format not in FORMATS:
        raise InvalidValue(f"Unknown format '{format}'.{nearest(str(format), FORMATS)}")
    if format == "text":
        return render_text(statement)
    data = report_data(statement, audit=audit)
    if format == "registry":
        if not data["is_private"]:
            raise InvalidValue(
                f"A registry entry needs a finite epsilon, and this run has none: {statement['claim']}. Use --format text."
            )
        return json.dumps(_registry_entry(data), allow_nan=False, indent=2, ensure_ascii=False) + "\n"
    return _templates().get_template(f"{format}.md").render(**data)


def report_data(statement: Mapping[str, Any], *, audit: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Compute everything that a report shows.

    Args:
        statement: The statement of a run.
        audit: The record of an audit of the same run, or None.

    Returns:
        Plain JSON data: the statement under "statement", and the other values that the templates use.
    """
    events = composed_events(statement)
    attacker = attacker_figures(statement)
    ledger = statement.get("ledger", NOT_DECLARED)
    model = _deployment_model(statement)
    setting, trust = SETTINGS[model]
    return {
        "statement": dict(statement),
        "is_private": not math.isinf(float(statement["claimed"]["epsilon"])),
        "setting": setting,
        "trust": trust,
        "is_federated": model != "central",
        "mechanism": _mechanism(statement),
        **attacker.record,
        "attacker_method": attacker.method,
        "against_server": _against_server(statement),
        "events": [{"event": _in_words(event), "times": times} for event, times in events],
        "assumptions": _assumptions(statement),
        "tuning": _tuning([event for event, _ in events]),
        "audit": _audit(audit),
        "ledger": ledger if isinstance(ledger, Mapping) else {"charges": NOT_DECLARED, "head": NOT_DECLARED},
        "software": _software(statement),
    }


def composed_events(statement: Mapping[str, Any]) -> list[tuple[Event, int]]:
    """Return the events that were charged according to a statement, with their counts.

    Raises:
        LedgerError: This version does not know one of the events.
    """
    return _from_records(statement["composed"])


def claimed_events(statement: Mapping[str, Any]) -> list[tuple[Event, int]] | None:
    """Return the events whose cost a statement claims; None if the claim is not the cost of a list of events."""
    if statement["claimed"]["accountant"] in ACCOUNTANTS:
        return composed_events(statement)
    # A run that was stopped early claims the cost of all declared rounds. Their events are under "basis".
    basis = statement.get("basis")
    records = basis.get("composed") if isinstance(basis, Mapping) else None
    return None if records is None else _from_records(records)


def attacker_figures(statement: Mapping[str, Any]) -> Figures:
    """Compute mu and the true-positive rates that follow from the claim of a statement."""
    epsilon, delta = float(statement["claimed"]["epsilon"]), float(statement["delta"])
    events = claimed_events(statement)
    # DP: the profile of events holds for a claim that an accountant computed from these events. Another claim, such as a
    # declared budget, covers more than was charged: only its own pair may be used.
    return figures_of_pair(epsilon, delta) if events is None else figures(events, delta)


def _against_server(statement: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return epsilon, mu and rates against the server of a run with distributed noise; None for other runs."""
    server = statement.get("against_server")
    if server is None:
        return None
    events, delta = claimed_events(statement), float(statement["delta"])
    attacker = (
        figures_of_pair(float(server["epsilon"]), delta)
        if events is None or math.isinf(float(server["epsilon"]))
        else figures([(against_server(event), times) for event, times in events], delta)
    )
    return {"epsilon": server["epsilon"], "accountant": server["accountant"], **attacker.record}


def _from_records(records: Sequence[Mapping[str, Any]]) -> list[tuple[Event, int]]:
    return [
        (from_record({key: value for key, value in record.items() if key != "times"}), int(record["times"]))
        for record in records
    ]


def _deployment_model(statement: Mapping[str, Any]) -> str:
    """Return the setting of the run, a key of `SETTINGS`."""
    if any(record["kind"] == "distributed_gaussian" for record in statement["composed"]):
        return "distributed noise"
    nodes = statement.get("federated")
    if not isinstance(nodes, Mapping):
        return "central"
    return "secure aggregation" if nodes.get("secure_aggregation") else "federated"


_DRAWN = {
    "poisson": "users are drawn independently with probability q in each round",
    "cyclic_poisson": "users of the group whose turn it is are drawn independently with probability q in each round",
    "examples": "examples are drawn independently with probability q in each round, at most as many of a user as declared",
    "min_separation": "the rounds of one user are b apart: no draw is assumed",
}
"""What the accounting assumes about each kind of sampler."""


def _mechanism(statement: Mapping[str, Any]) -> str:
    """Describe the mechanism of the run in one sentence, for reviewers."""
    sampling = statement.get("sampling")
    drawn = _DRAWN.get(sampling.get("kind", "")) if isinstance(sampling, Mapping) else None
    noise = "Gaussian noise on the bounded average"
    if isinstance(correlated := statement.get("correlated_noise"), Mapping):
        noise = f"Gaussian noise on the bounded average that is correlated over rounds ({correlated['strategy']})"
    elif _deployment_model(statement) == "distributed noise":
        noise = "Gaussian noise that the nodes add to the sum"
    return f"{drawn or 'users take part in rounds'}; each update is clipped; {noise} (McMahan et al. 2018)"


_OLDER_AUDIT = frozenset({"run", "verdict", "exposure", "learned_by_heart", "one_run", "holds"})
"""The keys of audit.json in older versions, which wrote no digest."""


def read_audit(folder: str | Path, run: str) -> dict[str, Any] | None:
    """Read the record that `unheard audit` wrote in a run folder; None if the run was not audited.

    Args:
        folder: The run folder.
        run: The id of the run.

    Raises:
        RunFolderError: The record cannot be read, or belongs to another run.
    """
    path = Path(folder) / "audit" / "audit.json"
    # DP: a lower bound that cannot be found must not be left out beside the claim.
    if not os.path.lexists(path.parent if path.parent.is_symlink() else path):
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        _audit(record)
        # DP: a lower bound that was changed would stand beside the claim.
        if not _OLDER_AUDIT.issuperset(record) and record["sha256"] != record_digest(record):
            raise ValueError("another digest")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RunFolderError(
            f"{path} is not the record of an audit, or was changed. Delete it, or audit the run again: unheard audit {folder}."
        ) from None
    if record.get("run") not in (None, run):  # records of older versions have no run id
        raise RunFolderError(
            f"{path} is the audit of another run. Delete it, or audit the run again: unheard audit {folder}."
        )
    return record


def _audit(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the lower bounds of a one-run audit from its record; None if there was no one-run audit."""
    one_run = None if record is None else record["one_run"]
    if one_run is None:
        return None
    bounds = one_run.get("bounds") or [
        {
            "name": "distribution-free",
            "epsilon_at_least": one_run["epsilon_at_least"],
            "assumptions": "none about the scores (Steinke, Nasr and Jagielski 2023)",
        }
    ]
    return {
        "canaries": int(one_run["canaries"]),
        "rounds": int(one_run["rounds"]),
        "delta": float(one_run["delta"]),
        "confidence": float(one_run["confidence"]),
        "claimed": one_run["epsilon_claimed"],
        "holds": bool(one_run["holds"]),
        "bounds": [
            {
                "name": str(bound["name"]),
                "epsilon_at_least": "none" if (value := bound["epsilon_at_least"]) is None else float(value),
                "assumptions": str(bound["assumptions"]),
            }
            for bound in bounds
        ],
    }


def _tuning(events: list[Event]) -> str:
    """Return a sentence that says whether the claim includes the choice of hyperparameters."""
    selections = [event for event in events if isinstance(event, Selection)]
    if selections:
        return (
            f"included in the claim: the best of a random number of runs ({selections[0].mean_trials:g} on average) is "
            "released, and nothing of the others (Papernot and Steinke 2022)."
        )
    return (
        "not part of this claim, which is about one run. Every other run on these users is charged to the store's ledger; "
        "`unheard statement --all-runs` composes all of them. Settings chosen without these users' text cost nothing."
    )


def _assumptions(statement: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return a table of what the accounting assumes, whether it holds in this run, and how that is known."""

    def fact(name: str, key: str) -> Any:
        """Return one value of a table in the statement; None if the table or the key is missing."""
        table = statement.get(name)
        return table.get(key) if isinstance(table, Mapping) else None

    kinds = {record["kind"] for record in statement["composed"]}
    warnings = " ".join(statement["warnings"])
    is_seeded = "REPRODUCIBLE NOISE" in warnings
    is_secure = fact("randomness", "mode") == "secure"
    sampling = fact("sampling", "kind")
    start = fact("start", "from")
    is_paid = bool(statement["vocabulary_cost"]["events"])
    rows = [
        (
            _DRAWN.get(sampling or "", _DRAWN["poisson"]),
            "held" if sampling in _DRAWN else "NOT HELD" if sampling else "unknown",
            f"the run's sampler is '{sampling}'" if sampling else "the ledger does not name the sampler",
        ),
        (
            "each user changes the sum by at most the clip norm, and each round has noise of z times that",
            "NOT HELD" if "non_private" in kinds else "held",
            "at least one release had no noise" if "non_private" in kinds else "q and z are charged before each round",
        ),
        (
            "noise and cohorts are secret and fresh",
            "NOT HELD" if is_seeded else "held" if is_secure else "unknown",
            "the noise came from a known seed" if is_seeded else str(fact("randomness", "generator") or NOT_DECLARED),
        ),
        (
            "finite-precision arithmetic does not reveal more than real numbers would",
            "held",
            "sums are exact integers on a public grid, and noise is rounded to the same grid",
        ),
        (
            "population, weights and the denominator are public numbers",
            "declared",
            f"population {figure(statement.get('population', NOT_DECLARED))}, declared in the run file",
        ),
        (
            "the vocabulary is public, or its cost is included",
            "held" if is_paid else "declared",
            "its releases are among the charged events" if is_paid else "declared public by its source",
        ),
        *[("the settings of the run were not chosen by the words of its private vocabulary", "declared", NOT_CHECKED)]
        * is_paid,
        (
            "the first model does not depend on these users, or its cost is included",
            "declared"
            if "public" in str(start)
            else "held"
            if str(start).startswith(("seed", "an earlier"))
            else "unknown",
            f"it began from {start}" if start else "the ledger does not say what the run began from",
        ),
        (
            "one person is one user, and all stores with the same users share one ledger",
            "declared",
            NOT_CHECKED,
        ),
    ]
    return [{"assumption": a, "status": status, "basis": basis} for a, status, basis in rows]


def _software(statement: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the software that trained the model and that computed the statement."""
    recorded = statement.get("software")
    recorded = recorded if isinstance(recorded, Mapping) else {}
    return {
        "version": str(recorded.get("unheard", NOT_DECLARED)),
        "commit": str(recorded.get("commit", NOT_DECLARED)),
        "computed_with": ", ".join(f"{name} {version}" for name, version in statement["versions"].items()),
    }


def _in_words(event: Event) -> str:
    named = {key: value for key, value in vars(event).items() if key != "reason"}
    words = ", ".join(f"{key} {figure(value)}" for key, value in named.items())
    reason = getattr(event, "reason", "")
    return f"{type(event).__name__}({reason or words})"


def _registry_entry(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry with exactly the sections and keys of the registry's schema."""
    macros = vars(_templates().get_template("registry.txt").module)
    text = {name: macro(data).strip() for name, macro in macros.items() if not name.startswith("_")}
    statement = data["statement"]
    return {
        "url_slug": f"{FILL_IN}: a short name for the address",
        "status": "Draft",
        "tier": 3,
        "deployment": {
            "basic": {
                "name": f"{FILL_IN}: the name of the model",
                "data_curators": [f"{FILL_IN}: who publishes it"],
                "intended_use": f"{FILL_IN}: what it is used for",
                "data_product_type": "Machine learning model",
                "data_product_region": f"{FILL_IN}: the region that the text is from",
                "description": text["description"],
                "publication_date": f"{FILL_IN}: YYYY-MM-DD",
                "data_product_sector": "Technology",
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": text["data_domain"],
                "unprotected_quantities": text["unprotected_quantities"],
            },
            "privacy_loss": {
                "privacy_unit": statement["unit"],
                "privacy_unit_details": text["privacy_unit_details"],
                "privacy_parameters": {"epsilon": statement["claimed"]["epsilon"], "delta": statement["delta"]},
                "privacy_parameters_details": text["privacy_parameters_details"],
            },
            "deployment_model": {
                "model_name": "Federated" if data["is_federated"] else "Central",
                "model_name_details": text["model_name_details"],
                "actors": text["actors"],
                "release_type": "Many releases",
                "release_type_details": text["release_type_details"],
                "data_source_type": "Static",
                "data_source_type_details": text["data_source_type_details"],
                "access_type": "Non-interactive",
                "access_type_details": text["access_type_details"],
            },
            "accounting": {"post_processing": text["post_processing"], "composition": text["composition"]},
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": text["tuning"],
                "mechanisms": text["mechanisms"],
                "justification": f"{FILL_IN}: why this epsilon, this unit and this population were chosen",
            },
            "administrative": {
                "sources": text["sources"],
                "notes": text["notes"],
                "registry_authors": [f"{FILL_IN}: who wrote this entry"],
            },
        },
    }


@cache
def _templates() -> Environment:
    templates = text_templates("unheard.privacy", finalize=markdown_line)
    templates.filters |= {"percent": lambda share: f"{100 * share:.3g} %", "figure": figure, "at_most": rounded_up}
    templates.filters["in_words"] = _value_in_words
    return templates


def _value_in_words(value: Any) -> str:
    """Format a value as one line of text, tables and lists included."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value_in_words(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return "; ".join(_value_in_words(item) for item in value)
    return figure(value)


def markdown_line(value: Any) -> Any:
    """Make a string safe for Markdown and for a terminal: one line, printable characters, no table or HTML markup.

    Other values are returned unchanged.
    """
    if not isinstance(value, str):
        return value
    line = "".join(character if character.isprintable() else " " for character in value)
    return line.replace("|", "\\|").replace("<", "&lt;")
