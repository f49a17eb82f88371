"""The command line: one module for each command, which parses options, calls the packages below, and prints the result.

    main.py        the application: registers the commands, turns expected errors into one line and exit status 2
    options.py     options that several commands share
    display.py     what commands print: progress bars, tables, curves, warnings
    interruption.py  Ctrl-C in `prepare`
    processes.py   --processes: the same command in several processes

Modules of commands import only Typer at module level, so that `unheard --help` answers quickly; a command imports what
it needs when it runs.
"""

import multiprocessing
import sys

if sys.argv[1:2] == ["prepare"] and multiprocessing.parent_process() is None:
    from unheard.cli.interruption import stop_at_signals

    stop_at_signals()
