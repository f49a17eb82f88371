"""The command line. Each command parses its options, calls the packages below, and prints the result.

    main.py        the application: registers the commands, turns expected errors into one line and exit status 2
    options.py     options that several commands share
    display.py     what commands print: progress bars, tables, curves, warnings
    processes.py   Ctrl-C, SIGTERM and SIGHUP; --processes: the same command in several processes

The other modules hold the commands: one each, or a few that belong together (`train.py`: init, train, resume, sweep).

Modules of commands import only what is light at module level (Typer, Rich, `errors`, `formatting`, `run_folder`), so that
`unheard --help` answers quickly; a command imports the packages that it needs when it runs.
"""

import multiprocessing
import os
import sys
from pathlib import Path

# Only in the program itself: not where it is imported, not in its workers, and not in a rank, whose launcher gets the
# signal.
_program = Path(sys.argv[0] or ".")
_is_program = _program.stem in ("unheard", "unheard-script") or _program.parts[-2:] == ("unheard", "__main__.py")
if _is_program and multiprocessing.parent_process() is None and "WORLD_SIZE" not in os.environ:
    from unheard.cli.processes import stop_at_signals

    stop_at_signals()
