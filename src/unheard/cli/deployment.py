"""The commands that use a trained model: `export`, `card`, `predict`, `keyboard` and `personalize`.

    export       write the model for devices (ONNX, int8), for peft, transformers and llama.cpp, or for the hub
    card         write a model card with the privacy statement in it, in the form that the Hugging Face hub shows
    predict      print the next words that a run folder, an export or a personal model suggests
    keyboard     type with the suggestions of one or two models in a browser on this machine
    personalize  fine-tune a shared model on one person's text, for that person only

`export` compares the predictions of the exported files with those of the PyTorch model. An ONNX export runs on ONNX
Runtime and does not import torch. `keyboard` serves its page on the loopback interface; what is typed is neither
written to disk nor sent to another machine. A personal model was trained on one person's text without noise, so it must
not be shared, and only its owner can read its folder. The package `deployment/` does the work.
"""

import contextlib
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from unheard import storage
from unheard.cli.display import console, counted_bar, notes, output_stop_message, say, set_stop_message
from unheard.cli.options import Force, License, RunDir, number, option
from unheard.cli.processes import let_unwind
from unheard.errors import InputError
from unheard.formatting import shown_word
from unheard.run_folder import RunFolder

if TYPE_CHECKING:
    from unheard.deployment.personalize import PersonalResult

EXPORT_EXAMPLES = """Examples:

  unheard export runs/first --to onnx --out exports/first

  unheard predict exports/first/model.int8.onnx "how are"

  unheard export runs/smollm2 --to adapter --out exports/adapter

  unheard export runs/smollm2 --to gguf --out exports/gguf

  unheard export runs/first --to hub-folder --license apache-2.0 --out hub/first    (then: hf upload OWNER/NAME hub/first)
"""


def export(
    folder: RunDir,
    to: Annotated[
        Literal["onnx", "adapter", "merged", "gguf", "hub-folder"],
        option("The format. adapter, merged and gguf are for Hugging Face models."),
    ] = "onnx",
    out: Annotated[Path | None, option("The folder to create.", otherwise="exports/ and the run's name")] = None,
    license: License = None,
) -> None:
    """Write a run's newest model for devices, other programs or the Hugging Face hub, with its privacy statement.

    onnx has the model in float32 and int8, with its vocabulary; adapter is a PEFT adapter, merged a whole model for
    transformers, gguf one file for llama.cpp; hub-folder can be uploaded to the hub as it is, with a model card.
    """
    from unheard.deployment.export import export as export_model

    target = out or Path("exports") / folder.resolve().name
    set_stop_message(lambda: output_stop_message(target))
    if to == "hub-folder":
        return _write_hub_folder(folder, target, license)
    if to != "onnx":
        return _language_model(folder, target, to)
    with counted_bar() as progress:
        exported = export_model(folder, target, progress=partial(progress, "Comparing with PyTorch"))
    title = f"{exported.parameters:,} parameters"
    table = Table("file", "size", "same first word as PyTorch", "same three words", title=title)
    for name, size in exported.sizes.items():
        numbers = exported.agreement[name].numbers()
        shares = (f"{100 * numbers[key]:.2f} %" for key in ("same_first_choice", "same_suggestions_of_three"))
        table.add_row(name, f"{size / 1e6:.2f} MB", *shares)
    console.print(table)
    contexts = next(iter(exported.agreement.values())).contexts
    say(f"Compared on {contexts:,} contexts sampled from the model. The float32 scores are equal up to rounding.")
    say(f"Its privacy statement is exported with it: {exported.statement['claim']}.")
    if exported.statement["claimed"]["epsilon"] == "infinity":
        say("Do not publish it without a review: without a guarantee, a model can repeat text that its users wrote.")
    say(f'Try it: unheard predict {target} "how are"   or: unheard keyboard {target}')


def _language_model(folder: Path, target: Path, to: Literal["adapter", "merged", "gguf"]) -> None:
    """Write a Hugging Face model, and print its size and how far its scores are from those of the run's model.

    Args:
        folder: The run folder.
        target: The folder to create.
        to: The format.
    """
    from unheard.deployment.hugging_face_export import write_language_model

    written = write_language_model(folder, target, to)
    size = sum(written.files.values()) / 1e6
    say(f"{target}: {size:.1f} MB, scores within {written.difference:.1g} (relative) of the run's own model.")
    say(f"Its privacy statement is exported with it: {written.statement['claim']}.")


def _write_hub_folder(folder: Path, target: Path, license: str | None) -> None:
    """Write a folder for the Hugging Face Hub, and print how to upload it."""
    from unheard.deployment.hugging_face_export import write_hub_folder

    with counted_bar() as progress:
        compared = partial(progress, "Comparing with PyTorch")
        names = write_hub_folder(folder, target, license=license, progress=compared)
    say(f"{target} holds {', '.join(names)}. README.md is the model card, with the privacy statement in it.")
    say(f"Read it, then upload the folder: hf upload OWNER/{target.resolve().name} {target}")


CARD_EXAMPLES = """Examples:

  unheard card runs/first

  unheard card runs/first --out README.md --license apache-2.0

  unheard export runs/first --to hub-folder --out hub/first    (a whole folder to upload, with this card)
"""


def card(
    folder: RunDir,
    out: Annotated[Path | None, option("The file to write.", metavar="FILE", otherwise="DIR/README.md")] = None,
    license: License = None,
    force: Force = False,
) -> None:
    """Write a model card: README.md with YAML front matter, accuracy, settings and the privacy report of the run."""
    target = out or folder / "README.md"
    set_stop_message(lambda: output_stop_message(target))
    from unheard.deployment.card import write_card

    with notes.status("Computing the privacy statement"):
        path = write_card(folder, target, license=license, force=force)
    say(f"The model card is written: {path}")


PREDICT_EXAMPLES = """Examples:

  unheard predict runs/first "how are"

  unheard predict runs/first "see you" --top 10 --json

  unheard predict exports/first/model.int8.onnx "see you"    (an export; needs no torch)
"""


def predict(
    folder: Annotated[
        Path,
        typer.Argument(help="A run folder, an export (or one of its .onnx files), or a personal model.", metavar="DIR"),
    ],
    text: Annotated[str, typer.Argument(help="Some words to continue.")],
    top: Annotated[int, number("The number of suggestions.", min=1)] = 3,
    as_json: Annotated[bool, option("Print one JSON list on standard output.", "--json")] = False,
) -> None:
    """Suggest the next word after some words."""
    from unheard.corpus.vocabulary import SPECIALS

    model = _open(folder)
    text = text.encode("utf-8", "replace").decode("utf-8")
    words = model.predict(text, top)
    if as_json:
        print(json.dumps([{"word": word, "probability": probability} for word, probability in words]))
        return
    tokens = model.tokenizer
    # A subword token ("Ġcan", "'re") is hard to read on its own, so the table shows it with the text before it.
    table = Table("text with the next token" if tokens.is_subword else "next word", "probability")
    for word, probability in words:
        is_piece = tokens.is_subword and word not in SPECIALS
        shown = tokens.join([*tokens.split(text), word])[-40:] if is_piece else shown_word(word)
        table.add_row(escape(shown), f"{100 * probability:.1f} %")
    console.print(table)


def _open(folder: Path):
    """Return the model of a run folder, an export or a personal model.

    A run is opened with `Released.open`: `open_model` would also compute its privacy statement, which takes seconds.
    """
    from unheard.deployment.model import is_export, is_personal

    if is_export(folder) or is_personal(folder):
        from unheard.deployment.model import open_model

        return open_model(folder)
    from unheard.training.released import Released

    return Released.open(folder)


KEYBOARD_EXAMPLES = """Examples:

  unheard keyboard runs/private runs/plain

  unheard keyboard exports/first/model.int8.onnx --port 8123 --no-open
"""


def keyboard(
    folder: Annotated[Path, typer.Argument(help="A run folder, an export or a personal model.", metavar="DIR")],
    other: Annotated[
        Path | None, typer.Argument(help="A second model to compare with.", metavar="[DIR2]", show_default=False)
    ] = None,
    port: Annotated[int, number("The port of the page; 0 for any that is free.", min=0, max=65535)] = 0,
    open_browser: Annotated[
        bool, option("Open the page in the browser.", "--open/--no-open", show_default=True)
    ] = True,
) -> None:
    """Type with a model's suggestions, on a web page for this machine only. Nothing that is typed is kept."""
    import webbrowser

    # Must be set before torch is imported. A prediction is so small that a second thread makes it ten times slower.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from unheard.deployment.keyboard.server import KeyboardServer
    from unheard.deployment.keyboard.suggestions import suggester_for
    from unheard.deployment.model import open_models

    with notes.status("Opening the models and computing their privacy statements"):
        models = open_models([folder] if other is None else [folder, other])
        server = KeyboardServer([suggester_for(model) for model in models], port)
    let_unwind()
    console.print(f"The keyboard is at {server.address} for this machine only. Ctrl-C ends it.", highlight=False)
    if open_browser:
        webbrowser.open(server.address)
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever()


PERSONALIZE_EXAMPLES = """Examples:

  unheard personalize runs/first --text mine.txt --out ~/my-keyboard

  unheard keyboard ~/my-keyboard runs/first    (the personal and the shared model side by side)
"""


def personalize(
    folder: Annotated[Path, typer.Argument(help="A run folder: the shared model.", metavar="DIR")],
    text: Annotated[Path, option("The person's text: one message per line, the oldest first.")],
    out: Annotated[Path, option("The folder to create, outside every shared or synchronised folder.")],
    passes: Annotated[int, number("The largest number of passes over the text.", min=1, max=100)] = 5,
    learning_rate: Annotated[
        float | None, option("The learning rate.", otherwise="a tenth of the run's", metavar="RATE")
    ] = None,
    later: Annotated[
        float, option("The latest fraction of the text: kept for measuring, not trained on.", metavar="F")
    ] = 0.2,
) -> None:
    """Fine-tune a run's model on one person's text, on this machine, for that person only."""
    import torch

    from unheard.deployment.model import run_statement
    from unheard.deployment.personalize import NOT_FOR_OTHERS, PersonalSettings, check_output_folder, save_personal
    from unheard.deployment.personalize import personalize as personalize_model
    from unheard.training.released import Released

    torch.set_num_threads(1)  # a step is so small that more threads make it slower
    out = out.expanduser()
    set_stop_message(lambda: output_stop_message(out))
    check_output_folder(out)
    settings = PersonalSettings(passes=passes, learning_rate=learning_rate, later=later)
    released = Released.open(folder)
    try:
        words = storage.regular_file(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Cannot read {text} as UTF-8 text: {error}.") from None
    with counted_bar() as progress:
        learned = partial(progress, "Learning from this text")
        personal = personalize_model(released, words, settings, progress=learned)
    save_personal(released, personal, run_statement(RunFolder.open(folder)), out)
    _print_personal(personal)
    say(f"{NOT_FOR_OTHERS} It is in {out}, readable by you alone; {folder} is unchanged.")


def _print_personal(personal: "PersonalResult") -> None:
    """Print the accuracy and perplexity of the shared and the personal model on text that was not trained on."""
    both = (personal.before, personal.after)
    title = "On the latest part of this text, which was not learned"
    table = Table("", "shared model", "personal model", title=title)
    for key, name in (("accuracy_top1", "AccuracyTop1"), ("accuracy_top3", "AccuracyTop3")):
        table.add_row(name, *(f"{100 * numbers[key]:.2f} %" for numbers in both))
    table.add_row("perplexity", *(f"{numbers['perplexity']:.4g}" for numbers in both))
    console.print(table)
    if personal.passes == 0:
        say("No pass over the text improved its middle part: the personal model is the shared one. More text may help.")
    elif personal.after["accuracy_top1"] < personal.before["accuracy_top1"]:
        say(f"It learned for {personal.passes} passes and predicts fewer of the latest words: keep the shared model.")
    else:
        say(f"It learned for {personal.passes} passes; the number was chosen on the middle part of the text.")
