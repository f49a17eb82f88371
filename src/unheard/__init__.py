"""Unheard: train language models on user-generated text with user-level differential privacy.

Everything that a notebook needs is here. The names are listed in `__init__.pyi`, which serves type checkers and this file
alike. Each name is imported when it is first used, so `import unheard` is quick and the accounting runs without torch.

    import unheard

    store = unheard.prepare(rows, out="corpora/posts")
    run = unheard.Run(corpus=store, model=unheard.TiedLSTM(), plan=unheard.Plan(...), training=unheard.Training(rounds=100))
    for report in unheard.train(run, "runs/first"):
        print(report.round, report.epsilon, report.metrics)
"""

import os
import sys

# `python -m unheard` puts the working folder first on the path of imports, where a file such as torch.py would be
# executed. Take it off before the first import of another package.
if sys.argv[:1] == ["-m"] and ("-m", "unheard") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False):
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != os.path.realpath(os.curdir)]

# A signal during the imports of the command line ends it with one line; cli/processes.py takes over after them. Not in a
# rank, whose launcher gets the signal, and not where the package is imported by another program.
if (
    sys.orig_argv[1:3] == ["-m", "unheard"] or [os.path.basename(word) for word in sys.orig_argv[1:2]] == ["unheard"]
) and "WORLD_SIZE" not in os.environ:
    import signal

    def _stop(*_: object) -> None:
        os.write(2, b"unheard: Stopped before anything was written. The same command starts again.\n")
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

# A library prints no log by itself; the program that uses it decides. `unheard COMMAND --log-file FILE` writes one.
logging.getLogger("unheard").addHandler(logging.NullHandler())

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
