"""The command line. Each command parses its options, calls the packages below, and prints the result.

    main.py        the application: registers the commands, turns expected errors into one line and exit status 2
    options.py     options that several commands share
    display.py     what commands print: progress bars, tables, curves, warnings
    processes.py   Ctrl-C, SIGTERM and SIGHUP; --processes: the same command in several processes

The other modules hold the commands: one each, or a few that belong together (`train.py`: init, train, resume, sweep).

At module level these modules import only small packages (Typer, Rich, `errors`, `formatting`, `run_folder`), so that
`unheard --help` answers quickly. Each command function imports the other packages that it needs when it runs.
"""

import multiprocessing
import os
import sys
from pathlib import Path

# Install the signal handlers only in the program itself: not in a program that imports this package, not in a worker
# process, and not in a rank, because its launcher handles the signals.
_program = Path(sys.argv[0] or ".")
_is_program = _program.stem in ("unheard", "unheard-script") or _program.parts[-2:] == ("unheard", "__main__.py")
if _is_program and multiprocessing.parent_process() is None and "WORLD_SIZE" not in os.environ:
    from unheard.cli.processes import stop_at_signals

    stop_at_signals()
