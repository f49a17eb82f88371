"""`unheard canaries`: secrets to plant, drawn at random from the words of a vocabulary."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard canaries corpora/chat --out canaries.jsonl

  unheard prepare posts.jsonl --canaries canaries.jsonl --out corpora/with-canaries    (then train, then unheard audit)
"""


def canaries(
    store: Annotated[
        Path, typer.Argument(help="A store, or a vocabulary.txt: where the words come from.", metavar="STORE")
    ],
    out: Annotated[Path, typer.Option(help="The file to write, for `unheard prepare --canaries`.")],
    users: Annotated[
        list[int] | None, typer.Option(help="Users that carry a secret: one group for each (0, 1, 14, 200).", min=0)
    ] = None,
    each: Annotated[int, typer.Option(help="Secrets in each group.", min=1)] = 3,
    words: Annotated[int, typer.Option(help="Words of a secret.", min=2, max=50)] = 5,
    repeats: Annotated[int, typer.Option(help="How often each of its users writes it.", min=1)] = 1,
) -> None:
    """Draw random phrases to plant in chosen users' text. Those that nobody carries (0 users) are controls."""
    import json
    import os

    from unheard.cli.display import say
    from unheard.corpus.store import TokenStore
    from unheard.corpus.vocabulary import Vocabulary
    from unheard.errors import InputError
    from unheard.randomness import secure_generator

    vocabulary = Vocabulary.load(store / "vocabulary.txt" if store.is_dir() else store)
    groups = users or [0, 1, 14, 200]
    if store.is_dir() and sum(groups) * each > TokenStore.open(store).train.num_users:
        raise InputError(
            f"{sum(groups) * each} users would carry a secret, more than {store} trains on: `unheard prepare` would refuse them. "
            "Ask for fewer, for example --users 0 --users 1 --users 5."
        )
    plain = [w for w in (vocabulary.word(i) for i in range(3, len(vocabulary))) if w.isalpha() and w == w.lower()]
    if len(plain) < 10:
        raise InputError(f"{store} has too few plain words to draw secrets from: give a larger vocabulary.")
    rng = secure_generator()
    lines = []
    for carriers in groups:
        for _ in range(each):
            text = " ".join(plain[int(i)] for i in rng.integers(len(plain), size=words))
            lines.append(json.dumps({"text": text, "users": carriers, "repeats": repeats}, ensure_ascii=False))
    # A secret is one until the audit: for its owner alone, and never over another file.
    try:
        with os.fdopen(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    except FileExistsError:
        raise InputError(f"{out} exists and is kept: name another file with --out.") from None
    say(f"{len(lines)} secrets in {out}. Plant them: unheard prepare INPUT --canaries {out} ...")
