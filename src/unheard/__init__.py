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

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
