"""`unheard keyboard`: type on a model, or on two side by side, in the browser of this machine."""

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
        Path | None, typer.Argument(help="A second one, to compare with.", metavar="[DIR2]", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 0,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in the browser.", show_default=True)
    ] = True,
) -> None:
    """Open a phone's keyboard on a web page: three suggestions at each key. For this machine only; nothing typed is kept."""
    import contextlib
    import os
    import webbrowser

    # Before torch is imported, since each of the server's threads asks anew. A step is small: two threads would wait for each other
    # ten times longer than they work.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from unheard.cli.display import console, notes
    from unheard.deployment.keyboard.server import KeyboardServer
    from unheard.deployment.keyboard.suggestions import Suggester
    from unheard.deployment.loading import open_models

    with notes.status("Opening the models and working out what may be said about them"):
        models = open_models([folder] if other is None else [folder, other])
        server = KeyboardServer([Suggester(model) for model in models], port)
    console.print(f"The keyboard is at {server.address} for this machine only. Ctrl-C ends it.", highlight=False)
    if open_browser:
        webbrowser.open(server.address)
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever()
