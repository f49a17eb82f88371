"""Print the messages of one writer of the demo's chat corpus, oldest first, one per line.

The output is a text for `unheard personalize`. The writer is the one whose number of words is closest to `--words`. The
corpus (PyPI: chitchat-dataset, MIT) is public, and its writers have pseudonyms.

Run it: python examples/one_writer.py [--words 15000] > mine.txt      Needs: pip install 'unheard[demo]'
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import files


def main() -> None:
    """Read the corpus and print the messages of the chosen writer."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words.add_argument("--words", type=int, default=15_000)
    given = words.parse_args()
    dataset = next(file for file in files("chitchat-dataset") or () if file.name == "dataset.json")
    conversations = json.loads(dataset.read_text(encoding="utf-8")).values()
    messages = (message for chat in conversations for turn in chat["messages"] for message in turn)
    print("\n".join(one_writer(messages, given.words)))


def one_writer(messages: Iterable[dict[str, str]], words: int) -> list[str]:
    """Return the texts of the writer whose number of words is closest to `words`, oldest first.

    Args:
        messages: Messages with `sender`, `timestamp` and `text`.
        words: The wanted number of words.
    """
    by_writer = defaultdict(list)
    for message in messages:
        by_writer[message["sender"]].append((message["timestamp"], " ".join(message["text"].split())))
    chosen = min(by_writer.values(), key=lambda wrote: abs(sum(len(text.split()) for _, text in wrote) - words))
    return [text for _, text in sorted(chosen) if text]


if __name__ == "__main__":
    main()
