"""Composes a new run file, with a comment on every key and the noise that a target epsilon needs.

    new = new_run_file("run.toml", corpus=Path("corpora/chat"), population=760_000, epsilon=2.0)
    new.text          # the TOML text
    new.sentences     # sentences about the chosen noise, to print
    new.noise         # the noise in proportion to the clip norm S, to warn if it is too large

The settings are the paper's, or for a base model those of fine-tuning with LoRA. Without a target epsilon, z = 1. With
a target, z is the smallest noise multiplier that meets the target after all rounds (`privacy/planner.py`), or that of
the best of several kinds of noise (`privacy/noise_choice.py`). The text is rendered from the template
`templates/run.toml`; `unheard init` writes it to a file.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import InvalidValue
from unheard.formatting import text_templates
from unheard.privacy.budget import default_delta
from unheard.privacy.events import NoiseLevel
from unheard.privacy.noise_choice import NoiseOption, best, compare_noise
from unheard.privacy.planner import PAPER_CLIP_NORM, PAPER_PARAMETERS
from unheard.privacy.planner import plan as solve

PAPER_VOCABULARY, PAPER_EMBEDDING = 10_000, 96
LONG_VALUE = 60
"""If a key and its value take more columns than this, the comment stands on the line above instead of after them."""
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class NewRunFile:
    """The content of a new run file, which the caller writes to disk.

    Attributes:
        text: The text of the file.
        sentences: Sentences to print: which noise was chosen for a target epsilon, and what must still be declared.
        noise: The noise of one round in proportion to S; None if the number of parameters or sigma is not known here
            (for a base model, or if the noise was chosen by comparison).
        has_store: Whether the store that the file names exists.
    """

    text: str
    sentences: tuple[str, ...]
    noise: NoiseLevel | None
    has_store: bool


def new_run_file(
    name: str | Path,
    *,
    corpus: Path,
    population: int,
    users_per_round: float | None = None,
    rounds: int = 1000,
    epsilon: float | None = None,
    compares_noise: bool = False,
    base: Path | None = None,
    progress: Progress = lambda step: None,
) -> NewRunFile:
    """Compose a commented run file.

    Args:
        name: The name of the file, for the comment on how to start the run.
        corpus: The folder of the token store. If it exists, the size of its vocabulary is written to the file.
        population: The declared number of users.
        users_per_round: Expected users per round; None for 100, or for `population` if that is smaller.
        rounds: The number of rounds to train.
        epsilon: The target epsilon after all rounds; None for z = 1.
        compares_noise: Whether to choose between independent and correlated noise at the target epsilon.
        base: The folder of a base model to fine-tune; None for the paper's LSTM.
        progress: Called with a line of text before each trial of a search for z.

    Raises:
        InvalidValue: A value is out of range, `compares_noise` is given without `epsilon`, `corpus` is a file,
            or `base` is not the folder of a model.
        AccountingError: No noise meets the target.
    """
    if users_per_round is not None and users_per_round <= 0:
        raise InvalidValue(f"--users-per-round must be above 0, not {users_per_round:g}.")
    if users_per_round is not None and users_per_round > population:
        raise InvalidValue(
            f"--users-per-round {users_per_round:g} is more than the declared population of {population}. Lower it: each user is "
            "drawn with probability (users per round) / population."
        )
    if compares_noise and epsilon is None:
        raise InvalidValue("Give --noise auto together with --epsilon: kinds of noise are compared at one epsilon.")
    if base is not None and not (base / "config.json").is_file():
        raise InvalidValue(
            f"{base} is not the folder of a language model: it has no config.json. Make it with `unheard base`."
        )
    if corpus.is_file():
        raise InvalidValue(
            f"--corpus {corpus} is a file. Make a token store from it with `unheard prepare {corpus} --user-field COLUMN "
            "--text-field COLUMN --out corpora/NAME`, and name the store."
        )
    words = corpus / "vocabulary.txt"
    vocabulary_size = len(Vocabulary.load(words)) if words.exists() else PAPER_VOCABULARY
    per_round = min(100, population) if users_per_round is None else users_per_round
    delta = float(f"{default_delta(population):.3e}")  # rounded as in the file, so that z is computed for that delta
    choice = _choose_noise(population, per_round, rounds, epsilon, delta, compares_noise, progress)
    text = (
        text_templates("unheard.training")
        .get_template("run.toml")
        .render(
            name=name,
            corpus=json.dumps(str(corpus)),
            population=population,
            delta=delta,
            base=None if base is None else json.dumps(str(base)),
            vocabulary_size=vocabulary_size,
            users_per_round=int(per_round) if float(per_round).is_integer() else per_round,
            rounds=rounds,
            **vars(choice),
        )
    )
    noise, sentences = None, [choice.sentence] if choice.sentence else []
    if base is not None:
        sentences.append(
            "The guarantee does not cover what the base has seen: set model.base_is_public = true if no user contributed."
        )
    elif not compares_noise:
        # The number of parameters of the paper's model, corrected for the size of this vocabulary.
        parameters = PAPER_PARAMETERS + PAPER_EMBEDDING * (vocabulary_size - PAPER_VOCABULARY)
        sigma = choice.z * PAPER_CLIP_NORM / per_round
        noise = NoiseLevel(noise_std=sigma, clip_norm=PAPER_CLIP_NORM, parameters=parameters)
    return NewRunFile(text=_aligned(text), sentences=tuple(sentences), noise=noise, has_store=words.exists())


@dataclass(frozen=True, kw_only=True)
class _NoiseChoice:
    """The noise of the run file: z, the chosen option if the noise is correlated, and a sentence about the choice."""

    z: float = 1.0
    correlated: NoiseOption | None = None
    gain: str = ""
    sentence: str = ""


def _choose_noise(
    population: int,
    users_per_round: float,
    rounds: int,
    epsilon: float | None,
    delta: float,
    compares_noise: bool,
    progress: Progress,
) -> _NoiseChoice:
    """Choose the smallest noise that meets the target epsilon.

    With `compares_noise`, several kinds of noise are compared at that epsilon, and the one with the smallest error is
    chosen. Otherwise the noise is independent.
    """
    if epsilon is None:
        return _NoiseChoice()
    target: dict[str, Any] = {"users_per_round": users_per_round, "rounds": rounds, "epsilon": epsilon, "delta": delta}
    if not compares_noise:
        z = solve(users=population, **target, progress=progress).estimate.noise_multiplier
        sentence = f"z = {z:g} meets epsilon {epsilon:g} at delta {delta:.4g} after {rounds:,} rounds."
        return _NoiseChoice(z=z, sentence=sentence)
    options = compare_noise(population=population, **target, progress=progress)
    chosen = best(options)
    z = chosen.noise_multiplier
    if chosen.factorisation is None:
        return _NoiseChoice(z=z, sentence=f"Independent noise is best here: z = {z:g} meets epsilon {epsilon:g}.")
    gain = f"{1 - chosen.rms_error / options[0].rms_error:.0%}"
    sentence = f"Correlated noise ({chosen.kind}, {chosen.sampling}) has {gain} less error than independent noise."
    return _NoiseChoice(z=z, correlated=chosen, gain=gain, sentence=sentence)


def _aligned(text: str) -> str:
    """Align the comments of each table of the run file. The template marks each comment with a tab before it."""
    lines: list[str] = []
    for table in text.split("\n\n"):
        rows = [line.partition("\t# ") for line in table.split("\n")]
        short = [len(value) for value, tab, _ in rows if tab and len(value) <= LONG_VALUE]
        width = max([29, *short])
        for value, tab, comment in rows:
            if tab and len(value) > LONG_VALUE:
                lines += [f"# {comment}", value]
            else:
                lines.append(f"{value:<{width}}  # {comment}" if tab else value)
        lines.append("")
    return "\n".join(lines[:-1])
