"""Personalize a model: continue training on one user's own text, for that user only.

The paper describes personalization in appendix B. The updates are not clipped and get no noise, because only the user
receives the model.

    released = Released.open("runs/private")
    result = personalize(released, text)
    result.before["accuracy_top1"], result.after["accuracy_top1"]       # on the user's latest text
    save_personal(released, result, statement, "mine")

The text has one message per line, oldest first. It is divided into three parts by time. The model learns from the
earliest part. The middle part selects the number of passes; afterwards the model learns from it too. The latest part
measures the accuracy before and after, and the model never learns from it.

A personal model is a folder with mode 0700 and files with mode 0600, outside all run folders, exports and stores. It
has no run file and no ledger, and `init_from` cannot read its model file, so no command can resume it, report on it,
export it or train from it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from unheard import storage
from unheard.config import parse_json, part_of_kind, require, require_positive, table_from_part
from unheard.corpus.tokenizers import tokenizer_from_table, tokenizer_to_table
from unheard.corpus.vocabulary import BOS, EOS, Vocabulary
from unheard.deployment.model import PERSONAL_RECORD, LoadedModel
from unheard.deployment.step import stepper_for
from unheard.errors import InputError, InvalidValue, RunFolderError, RunFolderExists
from unheard.evaluation.next_word import evaluate
from unheard.models.model import loss_gradient, unknown_features
from unheard.run_folder import record_digest
from unheard.training.released import Released
from unheard.training.run import MODELS
from unheard.updates.user_update import User, batches_of, windows_of

RECORD, MODEL = PERSONAL_RECORD, "personal.safetensors"
"""The two files of a personal model: its description and its parameters."""
SHARED = ("ledger.jsonl", "model.safetensors", "checkpoints", "export.json", "corpus.json")
"""Files that show that a folder is a run folder, an export or a store, which may be copied, published or trained on. A
run file is not listed, because it can be in any folder."""
LEAST_TOKENS = 200
"""The smallest number of tokens in a user's text. Less text would leave too little to measure the accuracy on."""
NOT_FOR_OTHERS = (
    "This model knows one person's own text, with no privacy at all. It is for that person: do not copy or publish it."
)


@dataclass(frozen=True, kw_only=True)
class PersonalSettings:
    """How a model is trained on a user's text. Batch size and unroll are those of the run that trained the model."""

    passes: int = 5
    """The largest number of passes over the text, from 1 to 100. The best number is selected on the middle part."""
    learning_rate: float | None = None
    """The learning rate of a local step. None for a tenth of the run's local learning rate, which is too large for a
    single user because the run averages the updates of many (docs/decisions/0048-personal-finish.md)."""
    later: float = 0.2
    """The share of the text, at its end, that measures the accuracy before and after, from 0.05 to 0.5. The middle part
    is the same share of the rest."""

    def __post_init__(self) -> None:
        require(1 <= self.passes <= 100, "passes must be at least 1, and at most 100.")
        require(0.05 <= self.later <= 0.5, "later must be from 0.05 to 0.5.")
        require_positive(learning_rate=self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class PersonalResult:
    """A personalized model and its accuracy."""

    params_P: Tensor
    """The parameters of the personal model."""
    before: dict[str, float]
    """The metrics of the shared model on the user's latest text."""
    after: dict[str, float]
    """The metrics of the personal model on the same text."""
    passes: int
    """The number of passes that was selected. If it is 0, no pass improved the model, and `params_P` is the shared
    model."""


def personalize(
    released: Released,
    text: str,
    settings: PersonalSettings = PersonalSettings(),
    *,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> PersonalResult:
    """Train a model on one user's text.

    The number of passes is selected first: the model is trained on the earliest part until the loss on the middle part
    no longer falls. Then the shared model is trained on both parts with this number of passes. The latest part is used
    only to measure the accuracy of both models.

    Args:
        released: The shared model.
        text: The user's text, one message per line, oldest first.
        settings: The number of passes, the learning rate, and the share of the text to measure on.
        progress: Called with the number of passes done so far and an estimate of their total.

    Raises:
        InputError: The text has fewer than `LEAST_TOKENS` tokens.
    """
    update, model = released.run.plan.update, released.run.model
    rate = settings.learning_rate or update.learning_rate / 10
    unroll, evaluation = update.unroll, released.run.evaluation
    earlier, later = split_by_time(released, text, settings.later)
    first, middle = _cut(earlier, 1 - settings.later)

    def loss_on(params_P: Tensor, tokens: np.ndarray) -> dict[str, float]:
        """Return the metrics of a model on a part of the text."""
        return evaluate(model, params_P, [_user(tokens, model)], unroll=evaluation.unroll)

    best, chosen = loss_on(released.params_P, middle)["loss"], 0
    params_P = released.params_P
    for done in range(1, settings.passes + 1):
        params_P = one_pass(released, params_P, first, rate, unroll)
        loss = loss_on(params_P, middle)["loss"]
        progress(done, 2 * settings.passes)
        if not loss < best:  # the model overfits, or the loss is not finite
            break
        best, chosen = loss, done
    params_P = released.params_P
    for done in range(chosen):
        params_P = one_pass(released, params_P, earlier, rate, unroll)
        progress(settings.passes + done + 1, settings.passes + chosen)
    params_P = model.project(params_P) if chosen else params_P
    return PersonalResult(
        params_P=params_P, before=loss_on(released.params_P, later), after=loss_on(params_P, later), passes=chosen
    )


def one_pass(released: Released, params_P: Tensor, tokens: np.ndarray, learning_rate: float, unroll: int) -> Tensor:
    """Train for one pass over a text with the local steps of FedAvg, without a clip. Return the new parameters.

    Args:
        released: The shared model. Its run gives the batch size; 8 if the run has none.
        params_P: The parameters before the pass.
        tokens: The token ids of the text.
        learning_rate: The learning rate of each step.
        unroll: The number of tokens in a window.
    """
    model, batch_size = released.run.model, released.run.plan.update.batch_size or 8
    features_F = unknown_features(model)
    for batch_BW in batches_of(windows_of(tokens, unroll), batch_size):
        params_P = params_P - learning_rate * loss_gradient(model, params_P, torch.as_tensor(batch_BW), features_F)
    return params_P


def split_by_time(released: Released, text: str, later: float) -> tuple[np.ndarray, np.ndarray]:
    """Encode a user's text and cut it in two between two messages.

    Args:
        released: The shared model. Its tokenizer and vocabulary encode the text.
        text: The user's text, one message per line, oldest first.
        later: The approximate share of the later part.

    Returns:
        The token ids of the earlier part and of the later part.

    Raises:
        InputError: The text has fewer than `LEAST_TOKENS` tokens.
    """
    messages = [words for words in map(released.tokenizer.split, text.splitlines()) if words]
    encoded = [np.concatenate([[BOS], released.vocabulary.encode_words(words), [EOS]]) for words in messages]
    ids = np.concatenate(encoded or [np.empty(0, dtype=np.int64)])
    if len(ids) < LEAST_TOKENS:
        raise InputError(
            f"The text has {len(ids)} tokens; at least {LEAST_TOKENS} are needed, most of them to learn from and the latest to "
            "measure on. Give more text: one message on each line, the oldest first."
        )
    return _cut(ids, 1 - later)


def _cut(ids: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Cut a text in two, at the start of the message that is nearest to the wanted position.

    If no message starts near that position, the cut is at the position itself, inside a message.

    Args:
        ids: The token ids of the text.
        share: The wanted share of the first part.
    """
    starts, wanted = np.flatnonzero(ids == BOS), int(len(ids) * share)
    near = starts[(starts > 0.5 * wanted) & (starts < 0.5 * (wanted + len(ids)))]
    cut = int(near[np.abs(near - wanted).argmin()]) if len(near) else wanted
    return ids[:cut], ids[cut:]


def _user(tokens: np.ndarray, model: Any) -> User:
    """Return a text as the text of one user, for the evaluation. Features about the user are set to zero."""
    return User(tokens, np.zeros(model.user_features, np.float32) if model.user_features else None)


def check_output_folder(out: str | Path) -> Path:
    """Check that a personal model may be written to a folder, and return the folder as an absolute path.

    The folder must not be inside a run folder, an export or a store: a copy of that folder would contain the personal
    model.

    Raises:
        InvalidValue: The folder is inside a run folder, an export or a store.
        RunFolderExists: The path is a file, or a folder that is not empty.
    """
    folder = Path(out).resolve()
    for above in (folder, *folder.parents):
        if shared := next((name for name in SHARED if (above / name).exists()), None):
            raise InvalidValue(
                f"--out {out} is inside {above}, a folder that may be shared, because it holds {shared}. A personal "
                "model contains one person's words: write it to a folder that belongs to that person alone."
            )
    if not storage.is_missing_or_empty(folder):
        raise RunFolderExists(f"{out} exists and is not an empty folder: choose another --out, or remove it first.")
    return folder


def save_personal(released: Released, result: PersonalResult, statement: dict[str, Any], out: str | Path) -> None:
    """Write a personal model to its own folder, which only its owner can read.

    Args:
        released: The shared model.
        result: The result of `personalize`.
        statement: The privacy statement of the shared model.
        out: The folder. It must be missing or empty.

    Raises:
        InvalidValue: The folder is inside a run folder, an export or a store.
        RunFolderExists: The path is a file, or a folder that is not empty.
    """
    model = released.run.model
    record = {
        "personal": NOT_FOR_OTHERS,
        "model": table_from_part(model, MODELS),
        "tokens": tokenizer_to_table(released.tokenizer),
        "words": list(released.vocabulary.words),
        "context": released.run.evaluation.unroll,
        "passes": result.passes,
        "on_later_text": {"before": result.before, "after": result.after},
        "statement_of_the_shared_model": statement,
    }
    own = {name: t.detach().clone().contiguous() for name, t in model.layout.split(result.params_P).items()}
    params = safetensors.torch.save(own, {"personal": NOT_FOR_OTHERS})
    record["params_sha256"] = hashlib.sha256(params).hexdigest()
    record["sha256"] = record_digest(record)
    files = {RECORD: json.dumps(record).encode(), MODEL: params}
    target = check_output_folder(out)
    # The folder appears with all files or not at all, and at no time can another account read a file.
    with storage.staged_folder(target) as folder:
        for name, content in files.items():
            storage.create_file(folder / name, content)
        if target.exists():
            target.rmdir()  # an empty folder whose mode may be other than 0700


def open_personal(path: Path) -> LoadedModel:
    """Open the folder of a personal model.

    Raises:
        RunFolderError: The folder is damaged or incomplete.
        ModelError: The privacy statement in the folder cannot be read.
    """
    if special := storage.special_file(path):
        raise RunFolderError(f"{special} is not a regular file. Make the personal model again: unheard personalize.")
    try:
        record = parse_json((path / RECORD).read_text(encoding="utf-8"))
        _check_digests(record, (path / MODEL).read_bytes())
        model = part_of_kind(MODELS, record["model"], "model")
        with safetensors.safe_open(path / MODEL, framework="pt") as file:  # pyright: ignore[reportPrivateImportUsage]
            params_P = model.layout.join({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return LoadedModel(
            name=path.resolve().name,
            kind="personal",
            stepper=stepper_for(model, params_P, record["context"]),
            vocabulary=Vocabulary(record["words"]),
            tokenizer=tokenizer_from_table(record["tokens"]),
            statement=record["statement_of_the_shared_model"],
        )
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise RunFolderError(
            f"{path} is not a complete personal model ({error}). Make it again: unheard personalize."
        ) from None


def _check_digests(record: Any, params: bytes) -> None:
    """Raise `ValueError` if the record or the parameters of a personal model are not those that were written.

    Args:
        record: The content of `personal.json`. Older versions wrote no digests; then nothing is compared.
        params: The content of the file of the parameters.
    """
    if not {"sha256", "params_sha256"} & set(record):
        return
    # DP: a statement that was changed, or of another run, would be shown as that of the shared model.
    if record["sha256"] != record_digest(record) or record["params_sha256"] != hashlib.sha256(params).hexdigest():
        raise ValueError("a file was changed, or is that of another model")
