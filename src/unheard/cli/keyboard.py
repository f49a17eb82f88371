"""`unheard keyboard`: type with the suggestions of one model, or of two side by side, in a browser on this machine.

Starts a web server on the loopback interface (`deployment/keyboard/`) and opens its page. The page shows what the
model's privacy statement says. Nothing that is typed is written to disk or sent to another machine.
"""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  unheard keyboard runs/private runs/plain

  unheard keyboard exports/first/model.int8.onnx --port 8123 --no-open
"""


def keyboard(
    folder: Annotated[Path, typer.Argument(help="A run folder, an export or a personal model.", metavar="DIR")],
    other: Annotated[
        Path | None,
        typer.Argument(help="A second model to compare with.", metavar="[DIR2]", show_default=False),
    ] = None,
    port: Annotated[
        int, typer.Option(help="The port of the page; 0 for any that is free.", min=0, max=65535, metavar="N")
    ] = 0,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser.", show_default=True)
    ] = True,
) -> None:
    """Type with a model's suggestions, on a web page for this machine only. Nothing typed is kept."""
    import contextlib
    import os
    import webbrowser

    # Set before torch is imported. A prediction is small: with two threads it would wait ten times longer than it
    # works.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from unheard.cli.display import console, notes
    from unheard.cli.interruption import let_unwind
    from unheard.deployment.keyboard.server import KeyboardServer
    from unheard.deployment.keyboard.suggestions import Suggester
    from unheard.deployment.loading import open_models

    with notes.status("Opening the models and computing their privacy statements"):
        models = open_models([folder] if other is None else [folder, other])
        server = KeyboardServer([Suggester(model) for model in models], port)
    let_unwind()
    console.print(f"The keyboard is at {server.address} for this machine only. Ctrl-C ends it.", highlight=False)
    if open_browser:
        webbrowser.open(server.address)
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever()
