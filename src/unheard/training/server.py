"""What the server does with a noisy average: the paper adds it; momentum and Adam are post-processing of the same.

In: a State and a NoisyAverage, and nothing else: un-noised user data cannot be spelled into a model. Out: the next State.
What training carries from one round to the next: the model, and the server's memory of earlier noisy averages.

Everything in a State is public: it was computed from noisy averages alone.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unheard.config import require
from unheard.mechanism.values import NoisyAverage
from unheard.models.model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class State:
    """After `round` rounds."""

    round: int
    params_P: Tensor = field(repr=False)
    server_memory: dict[str, Tensor] = field(default_factory=dict, repr=False)
    clip_norm: float | None = None
    """S of the next round, where it follows the users: counted under noise, and so public like all else here."""


@dataclass(frozen=True, kw_only=True)
class AddServer:
    """theta <- theta + average: the paper's."""

    def direction(self, average_P: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return average_P, memory


@dataclass(frozen=True, kw_only=True)
class MomentumServer:
    """v <- momentum * v + average; theta <- theta + learning_rate * v."""

    learning_rate: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning_rate must be above 0.")
        require(0 <= self.momentum < 1, "momentum must be in [0, 1).")

    def direction(self, average_P: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        velocity_P = self.momentum * memory.get("velocity", torch.zeros_like(average_P)) + average_P
        return self.learning_rate * velocity_P, {"velocity": velocity_P}


@dataclass(frozen=True, kw_only=True)
class AdamServer:
    """Adam on the noisy average (FedAdam), with bias correction."""

    learning_rate: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning_rate must be above 0.")
        require(0 <= self.beta1 < 1, "beta1 must be in [0, 1).")
        require(0 <= self.beta2 < 1, "beta2 must be in [0, 1).")
        require(self.epsilon > 0, "epsilon must be above 0.")

    def direction(self, average_P: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        zero_P = torch.zeros_like(average_P)
        steps = memory.get("steps", torch.zeros((), dtype=torch.float64)) + 1
        first_P = self.beta1 * memory.get("first", zero_P) + (1 - self.beta1) * average_P
        second_P = self.beta2 * memory.get("second", zero_P) + (1 - self.beta2) * average_P.square()
        unbiased_first = first_P / (1 - self.beta1 ** steps.item())
        unbiased_second = second_P / (1 - self.beta2 ** steps.item())
        step_P = self.learning_rate * unbiased_first / (unbiased_second.sqrt() + self.epsilon)
        return step_P, {"steps": steps, "first": first_P, "second": second_P}


Server = AddServer | MomentumServer | AdamServer
SERVERS: dict[str, type] = {"add": AddServer, "momentum": MomentumServer, "adam": AdamServer}


def step(server: Server, model: LanguageModel, state: State, noisy: NoisyAverage) -> State:
    """The next model."""
    # DP: only a NoisyAverage gets past here; the projection comes after the noise.
    if not isinstance(noisy, NoisyAverage):
        raise TypeError(f"the server takes a NoisyAverage, not {type(noisy).__name__}")
    average_P = noisy.average_P.to(state.params_P.device, state.params_P.dtype)
    step_P, memory = server.direction(average_P, state.server_memory)
    return State(round=state.round + 1, params_P=model.project(state.params_P + step_P), server_memory=memory)
