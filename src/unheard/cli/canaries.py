"""`unheard canaries`: draw random phrases to plant in users' text before an exposure audit.

The first of the three steps in `audit/planted_phrases.py`. The output is a file of JSON lines that only its owner may
read; `unheard prepare --canaries` plants the phrases, and `unheard audit` ranks them after training.
"""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard canaries corpora/chat --out canaries.jsonl

  unheard prepare posts.jsonl --canaries canaries.jsonl --out corpora/with-canaries    (then train, then unheard audit)
"""


def canaries(
    store: Annotated[
        Path, typer.Argument(help="A store or a vocabulary.txt, from which the words are drawn.", metavar="STORE")
    ],
    out: Annotated[Path, typer.Option(help="The file to write, for `unheard prepare --canaries`.")],
    users: Annotated[
        list[int] | None,
        typer.Option(
            help="How many users carry each phrase of a group. Repeat it for more groups.",
            min=0,
            metavar="N",
            show_default="0, 1, 14, 200",
        ),
    ] = None,
    each: Annotated[int, typer.Option(help="Phrases in each group.", min=1, metavar="N")] = 3,
    words: Annotated[int, typer.Option(help="Words of a phrase.", min=2, max=50, metavar="N")] = 5,
    repeats: Annotated[int, typer.Option(help="How often each carrier writes the phrase.", min=1, metavar="N")] = 1,
) -> None:
    """Draw random phrases to plant in users' text. Phrases that nobody carries (0 users) are controls."""
    import json
    from dataclasses import asdict

    from unheard import storage
    from unheard.audit.planted_phrases import draw_canaries
    from unheard.cli.display import say
    from unheard.corpus.store import TokenStore
    from unheard.corpus.vocabulary import Vocabulary
    from unheard.errors import InputError
    from unheard.randomness import secure_generator

    groups = users or [0, 1, 14, 200]
    if store.is_dir() and sum(groups) * each > TokenStore.open(store).train.num_users:
        raise InputError(
            f"{sum(groups) * each} users would carry a phrase, more than {store} trains on: `unheard prepare` would refuse them. "
            "Ask for fewer, for example --users 0 --users 1 --users 5."
        )
    vocabulary = Vocabulary.load(store / "vocabulary.txt" if store.is_dir() else store)
    drawn = draw_canaries(vocabulary, secure_generator(), carriers=groups, each=each, words=words, repeats=repeats)
    lines = "".join(json.dumps(asdict(canary), ensure_ascii=False) + "\n" for canary in drawn)
    try:
        storage.create_file(out, lines.encode())  # for its owner alone: a phrase must stay secret until the audit
    except FileExistsError:
        raise InputError(f"{out} exists and is kept: name another file with --out.") from None
    say(f"{len(drawn)} phrases in {out}. Plant them: unheard prepare INPUT --canaries {out} ...")
