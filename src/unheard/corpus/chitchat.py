"""The corpus that the software installs with: real chat, pseudonymous, MIT; small enough for a first run in seconds.

In: the PyPI package `chitchat-dataset` 0.9. Out: a token store by the same pipeline as any other input. 1,315 users,
two of whom wrote 18 % of the words: users with at least 100 tokens stay, and none counts for more than 1,600.
"""

import os

from unheard.corpus.imports import CHITCHAT_FIELDS, find_chitchat
from unheard.corpus.preparation import Preparation
from unheard.corpus.prepare import Prepared, prepare
from unheard.corpus.splits import SplitRule
from unheard.corpus.tasks import StreamRule
from unheard.corpus.workers import Progress

CHITCHAT = Preparation(
    fields=CHITCHAT_FIELDS,
    streams=StreamRule(min_tokens=100, tokens_per_user=1600),
    splits=SplitRule(held_out=0.1),
    name="chitchat",
)


def prepare_chitchat(out: str | os.PathLike[str], progress: Progress = lambda step, fraction: None) -> Prepared:
    """The default corpus as a store at `out`: a few seconds."""
    return prepare([find_chitchat()], out, CHITCHAT, progress=progress)
