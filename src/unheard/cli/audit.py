"""The commands that measure leakage: `audit` and `canaries`.

    canaries  draw random phrases to plant in users' text; `unheard prepare --canaries` plants them
    audit     attack a run: rank the planted phrases among random ones, and simulate the run with canary users

`audit` calls `audit_run` (`audit/summary.py`), prints its result in sentences, and writes `audit.json` and
`scores.svg`. Only its owner can read the file that `canaries` writes, because the phrases are secret until the audit
(`corpus/canaries.py`)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unheard import storage
from unheard.cli.display import confirm_no_noise, counted_bar, note, say, set_stop_message
from unheard.cli.options import AsJson, Corpus, Processes, RunDir, Yes, number, option
from unheard.cli.processes import run_on_processes
from unheard.errors import InputError

if TYPE_CHECKING:
    from unheard.audit.summary import AuditResult
    from unheard.engines.distributed.process_group import ProcessGroup

AUDIT_EXAMPLES = """Examples:

  unheard audit runs/first

  unheard audit runs/first --canaries 2000 --rounds 200 --json

  unheard audit runs/first --skip-one-run    (only: were planted phrases memorized?)

  unheard audit runs/first --with-users --processes 8
"""


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """The size of the attacks on the run, and which of them to make (arguments of `audit.summary.audit_run`)."""

    canaries: Annotated[
        int | None,
        number(
            "Canary users of the one-run audit.", min=2, otherwise="4000, or as many as the model has coordinates for"
        ),
    ] = None
    rounds: Annotated[int | None, number("Rounds of the one-run audit.", min=1, otherwise="as in the run")] = None
    candidates: Annotated[int, number("Random phrases with which each planted phrase is compared.", min=100)] = 10_000
    with_users: Annotated[
        bool,
        option("Let the users of the store take part in the one-run audit. They are charged for it.", "--with-users"),
    ] = False
    skip_one_run: Annotated[bool, option("Only rank planted phrases.", "--skip-one-run")] = False


def audit(
    folder: RunDir,
    *,
    out: Annotated[Path | None, option("The folder for audit.json and scores.svg.", otherwise="DIR/audit")] = None,
    corpus: Corpus = None,
    options: AuditOptions,
    yes: Yes = False,
    as_json: AsJson = False,
    processes: Processes = 1,
) -> None:
    """Attack a run: test whether planted phrases were memorized, and compare a lower bound on epsilon with the claim.

    The exit status is 2 if the lower bound is above the claimed epsilon.
    """
    charged = " What its users were charged stays charged." if options.with_users else ""
    set_stop_message(lambda: f"Stopped before the audit was written.{charged} Run the same command again.")

    def work(ranks: "ProcessGroup | None") -> None:
        """Audit the run, print the result and write it; `ranks` are the processes that share the work, or None."""
        from unheard.audit.summary import audit_run
        from unheard.engines.choice import EngineChoice
        from unheard.training.initialise import build_engine
        from unheard.training.released import Released

        released = Released.open(folder)
        store, target = Path(corpus or released.run.corpus), out or folder / "audit"
        charges = options.with_users and not options.skip_one_run
        allowed = charges and confirm_no_noise([released.run], yes, can_ask=ranks is None)
        target.mkdir(parents=True, exist_ok=True)  # first: if the folder cannot be made, no user is charged
        engine = build_engine(EngineChoice(), released.run.model, ranks)
        with counted_bar() as progress:
            result = audit_run(
                released, store, engine, name=folder.name, **vars(options), allow_no_privacy=allowed, progress=progress
            )
        result.write(target, folder.name)
        _print_audit(result, store, target, as_json)
        if not result.holds:
            raise typer.Exit(2)

    run_on_processes(work, processes)


def _print_audit(result: "AuditResult", store: Path, target: Path, as_json: bool) -> None:
    """Print the result of the audit in sentences, or as one JSON object on standard output."""
    record = result.record()
    if as_json:
        print(json.dumps(record, allow_nan=False))
        return
    for sentence in record["verdict"]:
        say(sentence)
    if result.exposures is None:
        is_part = (store / "part.json").is_file()  # only the whole store records who carries a phrase
        why = "is a part: name the whole store with --corpus" if is_part else "has none: `unheard canaries --help`"
        note(f"No planted phrases were ranked. {store} {why}.")
    say(f"Written to {target}")


CANARIES_EXAMPLES = """Examples:

  unheard canaries corpora/chat --out canaries.jsonl

  unheard prepare posts.jsonl --user-field author --text-field body --canaries canaries.jsonl --out corpora/canaries

  unheard train run.toml --out runs/first --set corpus.path=corpora/canaries    (then: unheard audit runs/first)
"""


def canaries(
    store: Annotated[
        Path, typer.Argument(help="A store or a vocabulary.txt, from which the words are drawn.", metavar="STORE")
    ],
    out: Annotated[Path, option("The file to write, for `unheard prepare --canaries`.")],
    users: Annotated[
        list[int] | None,
        number("Users that carry each phrase of a group. Repeat it for more groups.", min=0, otherwise="0, 1, 14, 200"),
    ] = None,
    each: Annotated[int, number("Phrases in each group.", min=1)] = 3,
    words: Annotated[int, number("Words in a phrase.", min=2, max=50)] = 5,
    repeats: Annotated[int, number("How often the phrase is planted in a carrier's text.", min=1)] = 1,
) -> None:
    """Draw random phrases to plant in users' text. Phrases with 0 users are not planted; they serve as controls."""
    from unheard.corpus.canaries import draw_canaries
    from unheard.corpus.store import TokenStore
    from unheard.corpus.vocabulary import Vocabulary
    from unheard.randomness import secure_generator

    groups = users or [0, 1, 14, 200]
    if store.is_dir() and sum(groups) * each > TokenStore.open(store).train.num_users:
        raise InputError(
            f"{sum(groups) * each} users would carry a phrase, but {store} has fewer training users: `unheard prepare` "
            "would refuse the file. Ask for fewer, for example --users 0 --users 1 --users 5."
        )
    vocabulary = Vocabulary.load(store / "vocabulary.txt" if store.is_dir() else store)
    drawn = draw_canaries(vocabulary, secure_generator(), carriers=groups, each=each, words=words, repeats=repeats)
    lines = "".join(json.dumps(asdict(canary), ensure_ascii=False) + "\n" for canary in drawn)
    try:
        storage.create_file(out, lines.encode())  # readable by its owner only: phrases stay secret until the audit
    except FileExistsError:
        raise InputError(f"{out} exists and is kept: name another file with --out.") from None
    say(f"{len(drawn)} phrases in {out}. Plant them: unheard prepare INPUT --canaries {out} ...")
