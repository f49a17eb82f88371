"""The server's step: what happens to the model with the noisy average of a round.

The paper adds the average (`AddServer`). `MomentumServer` and `AdamServer` are post-processing of the same noisy
averages, so they cost no privacy. A server is its own configuration: `[server] kind = "momentum"` in a run file.

Input: a `State` and a `NoisyAverage`, and nothing else, so that data of users without noise cannot get into a model.
Output: the next `State`. Literature: Reddi et al., "Adaptive Federated Optimization" (ICLR 2021), for momentum and Adam
on the server.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unheard.config import require
from unheard.mechanism.aggregation import NoisyAverage
from unheard.models.model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class State:
    """What training carries from one round to the next. Public: it was computed from noisy averages alone."""

    round: int
    """Rounds completed."""
    params_P: Tensor = field(repr=False)
    """The model's parameters as one vector."""
    server_memory: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """The server's moving averages, by name; empty for `AddServer`."""
    clip_norm: float | None = None
    """The clip norm S of the next round for an adaptive clip, which was estimated under noise; else None."""


@dataclass(frozen=True, kw_only=True)
class AddServer:
    """theta <- theta + average, the paper's server.

    >>> AddServer()
    AddServer()
    """

    def direction(self, average_P: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The step to add to the parameters, and the server's next memory."""
        return average_P, memory


@dataclass(frozen=True, kw_only=True)
class MomentumServer:
    """v <- momentum * v + average; theta <- theta + learning_rate * v.

    >>> MomentumServer(momentum=0.8).learning_rate
    1.0

    Args:
        learning_rate: Factor of the step, above 0.
        momentum: Factor of the velocity of the rounds before, in [0, 1).
    """

    learning_rate: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning_rate must be above 0.")
        require(0 <= self.momentum < 1, "momentum must be in [0, 1).")

    def direction(self, average_P: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The step to add to the parameters, and the server's next memory."""
        velocity_P = self.momentum * memory.get("velocity", torch.zeros_like(average_P)) + average_P
        return self.learning_rate * velocity_P, {"velocity": velocity_P}


@dataclass(frozen=True, kw_only=True)
class AdamServer:
    """Adam on the noisy average (FedAdam), with bias correction.

    >>> AdamServer(learning_rate=0.02).beta2
    0.99

    Args:
        learning_rate: Factor of the step, above 0.
        beta1: Decay of the moving average of the updates, in [0, 1).
        beta2: Decay of the moving average of their squares, in [0, 1).
        epsilon: Added to the denominator, above 0. Not a privacy parameter.
    """

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
        """The step to add to the parameters, and the server's next memory."""
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
"""The name of each server in a run file."""


def step(server: Server, model: LanguageModel, state: State, noisy: NoisyAverage) -> State:
    """Step the server: the state after one more round.

    Args:
        server: What to do with the average.
        model: Projects the parameters after the step (for example, embeddings back to norm 1).
        state: The state before the round.
        noisy: The noisy average of the round.

    Raises:
        TypeError: `noisy` is not a `NoisyAverage`.
    """
    # DP: only a NoisyAverage gets past here; the projection comes after the noise.
    if not isinstance(noisy, NoisyAverage):
        raise TypeError(f"the server takes a NoisyAverage, not {type(noisy).__name__}")
    average_P = noisy.average_P.to(state.params_P.device, state.params_P.dtype)
    step_P, memory = server.direction(average_P, state.server_memory)
    return State(round=state.round + 1, params_P=model.project(state.params_P + step_P), server_memory=memory)
