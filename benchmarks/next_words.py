"""Count how often the first suggestion of the keyboard is the next word, for several models at the same places.

    python -m benchmarks.next_words --store corpora/reviews_81 --out reproduction/results/reviews_81/next_words.json \\
        "LSTM, epsilon 8=WORK/runs/epsilon8-correlated" \\
        "SmolLM2, epsilon 8=runs/llm/reviews_81-users-epsilon_8.0-seed_1"

The store has tokens from which the text can be joined again, such as those of SmolLM2. Models of words and models of
pieces of words are compared by what a user of the keyboard sees: one whole word, suggested before a letter is typed.
Upper and lower case count as equal. The output has one number per place and model, 1 if the suggestion was right, and no
text. Models that are in the file already are not measured again. It needs no GPU.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from unheard.corpus.store import TokenStore
from unheard.corpus.tokenizers import HuggingFaceTokenizer
from unheard.corpus.vocabulary import BOS, EOS
from unheard.deployment.keyboard.suggestions import folded, suggester_for
from unheard.deployment.model import open_model

SEED, PLACES = 20261119, 1000
"""Seed and number of the places, as the rule expect-far-words in reproduction/rules.toml has them."""


def posts_of(store: Path, tokenizer: HuggingFaceTokenizer) -> Iterator[list[str]]:
    """Yield the words of each post of the held-out users, split at spaces.

    Args:
        store: The token store.
        tokenizer: The tokenizer that it was prepared with.
    """
    opened = TokenStore.open(store)
    for tokens in opened.held_out.users(np.arange(opened.held_out.num_users)):
        for post in np.split(tokens, np.flatnonzero(tokens == BOS)):
            pieces = [opened.vocabulary.word(i) for i in post.tolist() if i not in (BOS, EOS)]
            yield tokenizer.join(pieces).split()


def places_of(posts: list[list[str]], count: int) -> list[tuple[str, str]]:
    """Return random places: the text before a word, with a space at its end, and the word without punctuation.

    Args:
        posts: The words of each post.
        count: The number of places; fewer if there are not as many.
    """
    bare = [["".join(c for c in word if c.isalnum() or c in "'’") for word in post] for post in posts]
    every = [(p, w) for p, post in enumerate(bare) for w, word in enumerate(post) if w and word.strip("'’")]
    chosen = np.random.default_rng(SEED).permutation(len(every))[:count]
    return [(" ".join(posts[p][:w]) + " ", bare[p][w]) for p, w in (every[i] for i in sorted(chosen.tolist()))]


def hits_of(folder: Path, places: list[tuple[str, str]]) -> list[int]:
    """Return 1 for each place where the first suggestion of a model is the word, and 0 elsewhere."""
    suggester = suggester_for(open_model(folder))
    firsts = (suggester.suggest(before, 1) for before, _ in places)
    return [
        int(bool(first) and folded(first[0].word) == folded(word))
        for first, (_, word) in zip(firsts, places, strict=True)
    ]


def main() -> None:
    """Measure the models that are not in the file yet, and write their hits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="+", help="LABEL=RUN for each model; the first of pieces has the store's tokens"
    )
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--places", type=int, default=PLACES, help="fewer, to try the command")
    args = parser.parse_args()
    folders = {label: Path(path) for label, _, path in (model.rpartition("=") for model in args.models)}
    tokenizers = (open_model(folder).tokenizer for folder in folders.values())
    tokenizer = next(one for one in tokenizers if isinstance(one, HuggingFaceTokenizer))
    places = places_of(list(posts_of(args.store, tokenizer)), args.places)
    hits = json.loads(args.out.read_text())["hits"] if args.out.exists() else {}
    for label, folder in folders.items():
        if label not in hits:
            hits[label] = hits_of(folder, places)
            args.out.write_text(json.dumps({"seed": SEED, "hits": hits}) + "\n")
        print(f"{label}: {100 * np.mean(hits[label]):.1f} % of {len(hits[label]):,}", flush=True)


if __name__ == "__main__":
    main()
