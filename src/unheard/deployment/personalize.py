"""The personal finish: a shared model goes on learning from one person's text, on their machine, for them alone.

In: a released model and a text, one message a line, oldest first. Out: a personal folder, and accuracy before and after on the
person's later text. Where in the paper: appendix, personalization. There is no clip and no noise: nobody else ever sees it.
Where a personal model lives: a folder that only its person can read, and that no other command takes for a run.

In: a place for it. Out: a folder of mode 0700 with files of mode 0600, apart from every run and every export. It has no run.toml
and no ledger, and its model file is not of the kind that `init_from` reads: it cannot be resumed, reported, exported or begun from.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from unheard import storage
from unheard.config import part_of_kind, require, require_positive, table_from_part
from unheard.corpus.tokenizers import tokenizer_from_table, tokenizer_to_table
from unheard.corpus.vocabulary import BOS, EOS, Vocabulary
from unheard.deployment.model import PERSONAL_RECORD, LoadedModel
from unheard.deployment.step import stepper_for
from unheard.errors import InputError, InvalidValue, RunFolderError, RunFolderExists
from unheard.evaluation.next_word import evaluate
from unheard.models.model import mean_loss
from unheard.training.released import Released
from unheard.training.run_file import MODELS
from unheard.updates.users import User, batches_of, windows_of

RECORD, MODEL = PERSONAL_RECORD, "personal.safetensors"
SHARED = ("ledger.jsonl", "model.safetensors", "checkpoints", "export.json", "corpus.json")
"""Files by which a folder that may be copied, published or trained on is known. A run file alone is none: it lies anywhere."""


def check_output_folder(out: str | Path) -> Path:
    """Refuse a place inside anything that is shared: whoever copies that would copy the person's model with it."""
    place = Path(out).resolve()
    for above in (place, *place.parents):
        if found := next((name for name in SHARED if (above / name).exists()), None):
            raise InvalidValue(
                f"--out {out} lies in {above}, which is shared ({found}). A personal model has one person's words in it: keep it "
                "apart, in a folder of that person's own."
            )
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise RunFolderExists(f"{out} already holds something: choose another --out, or remove it first.")
    return place


def write_personal(place: Path, files: Mapping[str, bytes]) -> None:
    """Write all files or none; only the owner may read them, from the first byte on."""
    with storage.staged_folder(place) as folder:
        for name, content in files.items():
            storage.create_file(folder / name, content)
        if place.exists():
            place.rmdir()  # it was empty; its mode may have been anything


LEAST_TOKENS = 200
"""With less there is nothing to measure on."""
NOT_FOR_OTHERS = (
    "This model knows one person's own text, with no privacy at all. It is for that person: do not copy or publish it."
)


@dataclass(frozen=True, kw_only=True)
class PersonalSettings:
    """How a person's text is used. Batches and windows are as in the run that the model came from."""

    passes: int = 5
    """Passes over the text at most; how many are best is found on text of the person's own that lies between."""
    learning_rate: float | None = None
    """None: a tenth of the run's. Its own is for one pass of each of many users, whose average smooths it; alone it is too much
    (docs/decisions/0048-personal-finish.md)."""
    later: float = 0.2
    """The share of the text, at its end, on which before and after are measured. It is never learned from."""

    def __post_init__(self) -> None:
        require(1 <= self.passes <= 100, "passes must be at least 1, and at most 100.")
        require(0.05 <= self.later <= 0.5, "later must be from 0.05 to 0.5.")
        require_positive(learning_rate=self.learning_rate)


@dataclass(frozen=True, kw_only=True)
class PersonalResult:
    """A model that is a person's own."""

    params_P: Tensor
    before: dict[str, float]
    after: dict[str, float]
    passes: int
    """0: no number of passes helped, so the model is the shared one."""


def personalize(
    released: Released,
    text: str,
    how: PersonalSettings = PersonalSettings(),
    *,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> PersonalResult:
    """Learn from the earlier text, choose the number of passes on the middle, measure once on the latest."""
    update, model = released.run.plan.update, released.run.model
    rate = how.learning_rate or update.learning_rate / 10
    unroll, evaluation = update.unroll, released.run.evaluation
    earlier, later = split_by_time(released, text, how.later)
    first, middle = _cut(earlier, 1 - how.later)

    def loss_on(params_P: Tensor, tokens: np.ndarray) -> dict[str, float]:
        return evaluate(model, params_P, [_user(tokens, model)], unroll=evaluation.unroll)

    best, chosen = loss_on(released.params_P, middle)["loss"], 0
    params_P = released.params_P
    for done in range(1, how.passes + 1):
        params_P = one_pass(released, params_P, first, rate, unroll)
        loss = loss_on(params_P, middle)["loss"]
        progress(done, 2 * how.passes)
        if not loss < best:  # it has begun to learn by heart (or is not finite)
            break
        best, chosen = loss, done
    params_P = released.params_P
    for done in range(chosen):
        params_P = one_pass(released, params_P, earlier, rate, unroll)
        progress(how.passes + done + 1, how.passes + chosen)
    params_P = model.project(params_P) if chosen else params_P
    return PersonalResult(
        params_P=params_P, before=loss_on(released.params_P, later), after=loss_on(params_P, later), passes=chosen
    )


def one_pass(released: Released, params_P: Tensor, tokens: np.ndarray, learning_rate: float, unroll: int) -> Tensor:
    """The paper's local steps, without its clip."""
    model, batch_size = released.run.model, released.run.plan.update.batch_size or 8
    features_F = torch.zeros(model.user_features) if model.user_features else None
    for batch_BW in batches_of(windows_of(tokens, unroll), batch_size):
        params = {name: layer.detach().requires_grad_() for name, layer in model.layout.split(params_P).items()}
        loss = mean_loss(model, params, torch.as_tensor(batch_BW), features_F)
        gradients = torch.autograd.grad(loss, list(params.values()), materialize_grads=True)
        params_P = params_P - learning_rate * model.layout.join(dict(zip(params, gradients, strict=True)))
    return params_P


def split_by_time(released: Released, text: str, later: float) -> tuple[np.ndarray, np.ndarray]:
    """The person's stream, cut between two messages; the later part is about `later` of it."""
    messages = [words for words in map(released.tokens.split, text.splitlines()) if words]
    encoded = [np.concatenate([[BOS], released.vocabulary.encode_words(words), [EOS]]) for words in messages]
    ids = np.concatenate(encoded or [np.empty(0, dtype=np.int64)])
    if len(ids) < LEAST_TOKENS:
        raise InputError(
            f"The text has {len(ids)} tokens; at least {LEAST_TOKENS} are needed, most of them to learn from and the latest to "
            "measure on. Give more of it: one message on each line, the oldest first."
        )
    return _cut(ids, 1 - later)


def _cut(ids: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """At the message that begins nearest to that share; in the middle of a message if there is only one."""
    begins, place = np.flatnonzero(ids == BOS), int(len(ids) * share)
    inner = begins[(begins > 0.5 * place) & (begins < 0.5 * (place + len(ids)))]
    at = int(inner[np.abs(inner - place).argmin()]) if len(inner) else place
    return ids[:at], ids[at:]


def _user(tokens: np.ndarray, model: Any) -> User:
    return User(tokens, np.zeros(model.user_features, np.float32) if model.user_features else None)


def save_personal(released: Released, made: PersonalResult, statement: dict[str, Any], out: str | Path) -> None:
    """The personal folder: the model, its words, and a record that says whose it is not to become."""
    model = released.run.model
    record = {
        "personal": NOT_FOR_OTHERS,
        "model": table_from_part(model, MODELS),
        "tokens": tokenizer_to_table(released.tokens),
        "words": list(released.vocabulary.words),
        "context": released.run.evaluation.unroll,
        "passes": made.passes,
        "on_later_text": {"before": made.before, "after": made.after},
        "statement_of_the_shared_model": statement,
    }
    own = {name: t.detach().clone().contiguous() for name, t in model.layout.split(made.params_P).items()}
    files = {RECORD: json.dumps(record).encode(), MODEL: safetensors.torch.save(own, {"personal": NOT_FOR_OTHERS})}
    write_personal(check_output_folder(out), files)


def open_personal(path: Path) -> LoadedModel:
    """For the person's own keyboard."""
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        model = part_of_kind(MODELS, record["model"], "model")
        with safetensors.safe_open(path / MODEL, framework="pt") as file:  # pyright: ignore[reportPrivateImportUsage]
            params_P = model.layout.join({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return LoadedModel(
            name=path.resolve().name,
            kind="personal",
            stepper=stepper_for(model, params_P, record["context"]),
            vocabulary=Vocabulary(record["words"]),
            tokens=tokenizer_from_table(record["tokens"]),
            statement=record["statement_of_the_shared_model"],
        )
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as trouble:
        raise RunFolderError(
            f"{path} is not a whole personal model ({trouble}). Make it again: unheard personalize."
        ) from None
