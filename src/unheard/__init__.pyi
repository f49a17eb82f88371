"""The public API: every name of `import unheard` and the module that defines it."""

__version__: str

from .corpus.store import TokenStore as TokenStore
from .engines.choice import EngineChoice as EngineChoice
from .evaluation.next_word import Evaluation as Evaluation
from .mechanism.clipping import AdaptiveClip as AdaptiveClip
from .mechanism.clipping import FlatClip as FlatClip
from .mechanism.clipping import NoClip as NoClip
from .mechanism.clipping import PerLayerClip as PerLayerClip
from .mechanism.estimators import ClippedDenominator as ClippedDenominator
from .mechanism.estimators import FixedDenominator as FixedDenominator
from .mechanism.estimators import TrueAverage as TrueAverage
from .mechanism.noise import GaussianNoise as GaussianNoise
from .mechanism.noise import NoNoise as NoNoise
from .mechanism.plan import Plan as Plan
from .mechanism.sampling import FixedSizeSampling as FixedSizeSampling
from .mechanism.sampling import PoissonSampling as PoissonSampling
from .mechanism.schedule import Change as Change
from .models.hugging_face import HuggingFaceModel as HuggingFaceModel
from .models.module import ModuleModel as ModuleModel
from .models.recurrent import TiedGRU as TiedGRU
from .models.recurrent import TiedLSTM as TiedLSTM
from .privacy.budget import Budget as Budget
from .training.loop import resume as resume
from .training.loop import train as train
from .training.released import Released as Released
from .training.run import Run as Run
from .training.run import Training as Training
from .updates.fedavg import FedAvg as FedAvg
from .updates.fedsgd import FedSGD as FedSGD
from .updates.weighting import CappedWeights as CappedWeights
from .updates.weighting import EqualWeights as EqualWeights
