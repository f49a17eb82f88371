"""Unheard: train language models on what people write, with a proof that no single person can be heard in the result.

The menu. Names load when first used, so that `import unheard` is quick and `unheard.privacy` works without torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

# DP: Intel's matrix products round by where in memory a matrix lies, unless told not to before the first of them: a user's update
# would then depend on who else is in the chunk. It costs nothing that can be seen (docs/log.md).
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

if TYPE_CHECKING:
    from unheard.corpus.store import TokenStore as TokenStore
    from unheard.engines.engine import EngineChoice as EngineChoice
    from unheard.measure.next_word import Evaluation as Evaluation
    from unheard.mechanism.adaptive import AdaptiveClip as AdaptiveClip
    from unheard.mechanism.clipping import FlatClip as FlatClip
    from unheard.mechanism.clipping import NoClip as NoClip
    from unheard.mechanism.clipping import PerLayerClip as PerLayerClip
    from unheard.mechanism.estimators import ClippedDenominator as ClippedDenominator
    from unheard.mechanism.estimators import FixedDenominator as FixedDenominator
    from unheard.mechanism.estimators import TrueAverage as TrueAverage
    from unheard.mechanism.noise import GaussianNoise as GaussianNoise
    from unheard.mechanism.noise import NoNoise as NoNoise
    from unheard.mechanism.plan import Plan as Plan
    from unheard.mechanism.sampling import FixedSizeSampling as FixedSizeSampling
    from unheard.mechanism.sampling import PoissonSampling as PoissonSampling
    from unheard.mechanism.schedule import Change as Change
    from unheard.models.hugging_face import HuggingFaceModel as HuggingFaceModel
    from unheard.models.module import ModuleModel as ModuleModel
    from unheard.models.tied_gru import TiedGRU as TiedGRU
    from unheard.models.tied_lstm import TiedLSTM as TiedLSTM
    from unheard.privacy.budget import Budget as Budget
    from unheard.training.loop import resume as resume
    from unheard.training.loop import train as train
    from unheard.training.released import Released as Released
    from unheard.training.run import Run as Run
    from unheard.training.run import Training as Training
    from unheard.updates.fedavg import FedAvg as FedAvg
    from unheard.updates.fedsgd import FedSGD as FedSGD
    from unheard.updates.weighting import CappedWeights as CappedWeights
    from unheard.updates.weighting import EqualWeights as EqualWeights

_MENU = {
    # Algorithm 1's parts, in its order
    "Plan": "mechanism.plan",
    "PoissonSampling": "mechanism.sampling",
    "FixedSizeSampling": "mechanism.sampling",
    "EqualWeights": "updates.weighting",
    "CappedWeights": "updates.weighting",
    "FedAvg": "updates.fedavg",
    "FedSGD": "updates.fedsgd",
    "FlatClip": "mechanism.clipping",
    "PerLayerClip": "mechanism.clipping",
    "NoClip": "mechanism.clipping",
    "AdaptiveClip": "mechanism.adaptive",
    "FixedDenominator": "mechanism.estimators",
    "ClippedDenominator": "mechanism.estimators",
    "TrueAverage": "mechanism.estimators",
    "GaussianNoise": "mechanism.noise",
    "NoNoise": "mechanism.noise",
    "Change": "mechanism.schedule",
    # what is trained, on what, how
    "TokenStore": "corpus.store",
    "TiedLSTM": "models.tied_lstm",
    "TiedGRU": "models.tied_gru",
    "ModuleModel": "models.module",
    "HuggingFaceModel": "models.hugging_face",
    "EngineChoice": "engines.engine",
    "Evaluation": "measure.next_word",
    "Budget": "privacy.budget",
    "Training": "training.run",
    "Run": "training.run",
    "train": "training.loop",
    "resume": "training.loop",
    "Released": "training.released",
}
__all__ = list(_MENU)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MENU:
        raise AttributeError(f"module 'unheard' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unheard.{_MENU[name]}"), name)
