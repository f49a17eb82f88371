"""One writer's messages from the demo's chat corpus, oldest first, one on each line: a text for `unheard personalize`.

Run it: python examples/one_writer.py [--words 15000] > mine.txt
It is whoever wrote nearly that many words. The corpus (PyPI's chitchat-dataset, MIT) is public, its writers have pseudonyms.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from unheard.corpus.conversion import find_chitchat


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words.add_argument("--words", type=int, default=15_000)
    asked = words.parse_args()
    conversations = json.loads(Path(find_chitchat().path).read_text(encoding="utf-8")).values()
    messages = (message for one in conversations for turn in one["messages"] for message in turn)
    print("\n".join(one_writer(messages, asked.words)))


def one_writer(messages: Iterable[dict[str, str]], words: int) -> list[str]:
    by_writer = defaultdict(list)
    for message in messages:
        by_writer[message["sender"]].append((message["timestamp"], " ".join(message["text"].split())))
    chosen = min(by_writer.values(), key=lambda wrote: abs(sum(len(text.split()) for _, text in wrote) - words))
    return [text for _, text in sorted(chosen) if text]


if __name__ == "__main__":
    main()
