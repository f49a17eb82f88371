"""Opens the trained model of a run folder, for prediction, evaluation, export and audits.

    released = unheard.Released.open("runs/first")
    released.predict("how are", top=3)        # [("you", 0.41), ...]
    unheard.evaluate("runs/first")            # {"accuracy_top1": 0.17, ...} on held-out users

Input: a run folder. Output: the run, its newest released parameters, its vocabulary and tokenizer. Only `evaluate`
needs a token store. The model is checked against the run's ledger, and against the checkpoint of its round if the
folder has one. `deployment.model.open_model` also opens exports and personal models, for the keyboard.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from unheard.corpus.store import TokenStore
from unheard.corpus.tokenizers import Tokenizer, WordTokenizer, tokenizer_from_table
from unheard.corpus.vocabulary import Vocabulary
from unheard.engines.distributed.process_group import ProcessGroup
from unheard.errors import CheckpointCorrupt, CorpusError, ModelError, RunFolderMissing
from unheard.evaluation.next_word import Evaluation, predict
from unheard.evaluation.next_word import evaluate as evaluate_users
from unheard.privacy.ledger import run_id
from unheard.privacy.run_ledger import read_run_ledger
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import checkpoint_name, read_checkpoint, read_words, released_model
from unheard.training.run import Run, read_saved_run
from unheard.training.worker import parallel_map_for
from unheard.updates.user_update import users_in_turn

SECONDS_TO_WRITE_A_MODEL = 1.0
"""How long to wait for the model of the newest checkpoint, which a run that is training may be writing."""


@dataclass(frozen=True, kw_only=True)
class Released:
    """A released model with everything that prediction needs: configuration, parameters, vocabulary and tokenizer.

    >>> import unheard
    >>> released = unheard.Released.open("runs/first")
    >>> words = [word for word, probability in released.predict("how are", top=3)]
    >>> len(words)
    3

    Args:
        run: The run that trained the model, from its run file.
        params_P: The parameters of the newest released model.
        vocabulary: The words of the model's output layer.
        tokenizer: How text is split into tokens.
        id: The id of the run, from its ledger; None for a model that was not opened from a run folder.
        corpus: The name of the run's store (`TokenStore.name`), from its ledger; None if it is not known.
    """

    run: Run
    params_P: Tensor
    vocabulary: Vocabulary
    tokenizer: Tokenizer
    id: str | None = None
    corpus: str | None = None

    @classmethod
    def open(cls, path: str | Path) -> "Released":
        """Open the newest released model of a run folder.

        Raises:
            RunFolderMissing: `path` is not a run folder, or has released no model yet.
            RunFolderError: A file of the folder is damaged or belongs to another model.
            LedgerError: The model belongs to another run, or the ledger does not hold all charges of the model.
        """
        folder = RunFolder.open(path)
        if not folder.model.exists():
            raise RunFolderMissing(
                f"{path} has released no model yet, or has lost it. `unheard resume {path}` continues the run, and writes the "
                "newest model again."
            )
        # DP: a model that another run has trained would be shown, and measured, with this run's epsilon.
        ledger = read_run_ledger(folder)
        facts = ledger.facts
        run, _ = read_saved_run(folder.run_file)
        vocabulary, record = read_words(folder, run, facts)
        return cls(
            run=run,
            params_P=_own_model(folder, run),
            vocabulary=vocabulary,
            tokenizer=tokenizer_from_table(record) if record else WordTokenizer(),
            id=run_id(ledger),
            corpus=facts.get("corpus"),
        )

    def predict(self, text: str, top: int = 3) -> list[tuple[str, float]]:
        """Return the `top` most likely next words after a text, most likely first, as pairs (word, probability)."""
        return predict(self.run.model, self.params_P, self.vocabulary, self.tokenizer.split(text), top)


def _own_model(folder: RunFolder, run: Run) -> Tensor:
    """Read the parameters of the released model, and compare them with the checkpoint of its round if it still exists.

    Raises:
        CheckpointCorrupt: The model differs from the checkpoint, or is older than the newest one.
    """
    newest, tries = folder.saved_round, 3
    params_P, round = released_model(folder.model, run.model)
    # A run that is training writes the model some time after the checkpoint of the same round.
    while round < newest and (tries := tries - 1):
        time.sleep(SECONDS_TO_WRITE_A_MODEL / 2)
        params_P, round = released_model(folder.model, run.model)
    # DP: an earlier model of the run would be shown and measured as the newest one.
    if round < newest:
        raise CheckpointCorrupt(
            f"{folder.model} is the model after round {round}, but there is a checkpoint after round {newest}: an older copy "
            f"was put back, or the run was killed before it wrote the model. `unheard resume {folder.path}` writes it "
            "again. If the run is training, try again in a moment."
        )
    saved = folder.checkpoints / checkpoint_name(round)
    # DP: a model file of version 0.1 does not name its ledger; only its checkpoint tells it from another run's model.
    if saved.exists() and not torch.equal(params_P, read_checkpoint(saved).state.params_P):
        raise CheckpointCorrupt(
            f"{folder.model} is not the model of the checkpoint {saved.name}: it was replaced, or belongs to another "
            "run. Put this run's own model back, or delete it: resuming the run writes it again."
        )
    return params_P


def evaluate(
    model: Released | str | Path,
    *,
    corpus: str | Path | None = None,
    max_tokens: int | None = None,
    ranks: ProcessGroup | None = None,
) -> dict[str, float]:
    """Evaluate a released model on the held-out users of a corpus.

    >>> import unheard
    >>> metrics = unheard.evaluate("runs/first", max_tokens=1000)
    >>> 0 <= metrics["accuracy_top1"] <= metrics["accuracy_top3"] <= 1
    True

    Args:
        model: A run folder, or a `Released` model.
        corpus: A token store with the same vocabulary; None for the store of the run.
        max_tokens: The number of held-out tokens to use; None for the number in the run's configuration.
        ranks: The processes to evaluate on (training/worker.py); None for this process alone.

    Returns:
        `accuracy_top1`, `accuracy_top3`, `accuracy_top5`, `accuracy_top1_words` (end-of-sequence targets not counted),
        `loss` (nats per token), `perplexity` and `tokens`. They are computed from held-out users' text without noise.

    Raises:
        RunFolderError: The run folder cannot be used.
        CorpusError: The token store cannot be used.
        ModelError: The vocabulary of the store is not that of the model.
    """
    released, store, settings = open_for_evaluation(model, corpus, max_tokens)
    users = settings.choose(users_in_turn(store.held_out, released.run.model))
    parallel_map = parallel_map_for(released.run.model, ranks)
    return evaluate_users(
        released.run.model, released.params_P, users, unroll=settings.unroll, parallel_map=parallel_map
    )


def open_for_evaluation(
    model: Released | str | Path, corpus: str | Path | None, max_tokens: int | None
) -> tuple[Released, TokenStore, Evaluation]:
    """Open the model and the store of an evaluation. The arguments and the errors are those of `evaluate`.

    Returns:
        The model, the store, and the settings of the evaluation with `max_tokens` applied.
    """
    released = model if isinstance(model, Released) else Released.open(model)
    store = TokenStore.open(corpus or released.run.corpus)
    # DP: a path in the run file may be that of another store by now; figures of other users would stand beside this
    # run's epsilon.
    if corpus is None and released.corpus not in (None, store.name):
        raise CorpusError(
            f"{store.path} is not the store that this run began with, though its run file names that path ([corpus] path). "
            "Put the right path or store back; to measure on this store, name it with --corpus."
        )
    store.check_evaluated()
    if store.vocabulary != released.vocabulary:
        raise ModelError(
            f"{store.path} has another vocabulary than {model if model is not released else 'the model'}: prepare it "
            "with --vocab from-corpus --vocab-corpus STORE, where STORE is the store of the run."
        )
    settings = released.run.evaluation
    return released, store, replace(settings, max_tokens=max_tokens or settings.max_tokens)
