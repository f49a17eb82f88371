"""A released model, opened for use: what evaluation, prediction and everything after training read from a run folder.

In: a run folder. Out: the run, its newest released parameters, its words. No checkpoint, no ledger, no corpus is needed.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from unheard.corpus.tokenizers import Tokenizer, WordTokenizer, tokenizer_from_table
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import RunFolderError, RunFolderMissing
from unheard.evaluation.next_word import predict
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import load_model
from unheard.training.run import Run
from unheard.training.run_file import read_saved_run


@dataclass(frozen=True, kw_only=True)
class Released:
    """A model with its words."""

    run: Run
    params_P: Tensor
    vocabulary: Vocabulary
    tokens: Tokenizer

    @classmethod
    def open(cls, path: str | Path) -> "Released":
        folder = RunFolder.open(path)
        if not folder.model.exists():
            raise RunFolderMissing(f"{path} has released no model yet. Continue it with `unheard resume {path}`.")
        run, _ = read_saved_run(folder.run_file)
        try:
            table = json.loads(folder.tokens.read_text(encoding="utf-8")) if folder.tokens.exists() else {}
        except (ValueError, OSError, RecursionError):
            raise RunFolderError(f"{folder.tokens} does not read back as written: copy it from the corpus.") from None
        vocabulary = Vocabulary.load(folder.vocabulary)
        if len(vocabulary) != run.model.vocabulary_size:
            raise RunFolderError(
                f"{folder.vocabulary} has {len(vocabulary)} words, the model {run.model.vocabulary_size} rows: "
                "copy it from the corpus."
            )
        return cls(
            run=run,
            params_P=load_model(folder.model, run.model),
            vocabulary=vocabulary,
            tokens=tokenizer_from_table(table) if table else WordTokenizer(),
        )

    def predict(self, text: str, top: int = 3) -> list[tuple[str, float]]:
        """The most likely next words after a text, with their probabilities."""
        return predict(self.run.model, self.params_P, self.vocabulary, self.tokens.split(text), top)
