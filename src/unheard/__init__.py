"""Unheard: train language models on user-generated text with user-level differential privacy.

This package holds the public API. `__init__.pyi` lists its names, for type checkers and for the import hook at the end of
this file. Each name is imported when it is first used, so `import unheard` is fast and the accounting works without torch.
docs/code.md describes how the packages fit together.

    import unheard

    store = unheard.prepare(rows, out="corpora/posts")
    run = unheard.Run(corpus=store, model=unheard.TiedLSTM(), plan=unheard.Plan(...), training=unheard.Training(rounds=100))
    for report in unheard.train(run, "runs/first"):
        print(report.round, report.epsilon, report.metrics)
"""

import os
import sys

# `python -m unheard` puts the working folder first on sys.path. A file torch.py in that folder would then be executed
# instead of the package. Therefore the folder is removed before the first import of another package.
if sys.argv[:1] == ["-m"] and ("-m", "unheard") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False):
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != os.path.realpath(os.curdir)]

# The imports of the command line take a while. A signal during that time ends the command with one line instead of a
# traceback; cli/processes.py handles signals afterwards. A rank does not need this, because its launcher handles the
# signal, and a program that imports this package keeps its own signal handlers.
if (
    sys.orig_argv[1:3] == ["-m", "unheard"] or [os.path.basename(word) for word in sys.orig_argv[1:2]] == ["unheard"]
) and "WORLD_SIZE" not in os.environ:
    import signal

    def _stop(*_: object) -> None:
        os.write(2, b"unheard: Stopped before anything was written. Run the same command again.\n")
        os._exit(130)

    for _name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, _name) and signal.getsignal(getattr(signal, _name)) != signal.SIG_IGN:
            signal.signal(getattr(signal, _name), _stop)

import logging

import lazy_loader

__version__ = "0.2.0"

# DP: Intel MKL rounds matrix products by their address in memory unless this is set before the first product. A user's update
# would then depend on the other users of the chunk. No slowdown was measured (docs/log.md).
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# Dependencies that report their use to their vendors read these variables when they are imported. This file runs before every other
# module of the package, so the variables are set in time. A value that the user has set stays.
_NO_TELEMETRY = {
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime
    "HF_HUB_DISABLE_TELEMETRY": "1",  # the Hugging Face hub: datasets, transformers, tokenizers
    "FLWR_TELEMETRY_ENABLED": "0",  # Flower
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray
    "MLFLOW_DISABLE_TELEMETRY": "true",  # MLflow
    "DO_NOT_TRACK": "1",  # a convention that many packages follow
}
for _name, _value in _NO_TELEMETRY.items():
    os.environ.setdefault(_name, _value)

# A library does not print log messages by itself; the program that imports it decides where they go. The command line
# writes them with `unheard COMMAND --log-file FILE`.
logging.getLogger("unheard").addHandler(logging.NullHandler())

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
