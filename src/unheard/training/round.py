"""One round of the paper's Algorithm 1: draw a cohort, sum its clipped updates, average, add noise, step the server.

`run_rounds` is the round that training runs: the loop (training/loop.py) calls it for one run and for several runs at
the same time, on one process and on many. The caller charges each round to the ledger before it calls `run_rounds`.

    rounds = [Round(state=state, plan=plan, model=model, server=server, users=store.train, streams=streams, attempt=0)]
    [next_state] = run_rounds(rounds, engine)

Input: for each run its public state, the plan of the round, and its private users. Output: the next public states. The
types of the intermediate values say who may see them (mechanism/aggregation.py): `CohortSum` and `BoundedAverage` are
private, `NoisyAverage` and `State` are public.

**The server's step** is the end of the round: what happens to the model with the noisy average. The paper adds it
(`AddServer`). `MomentumServer` and `AdamServer` are post-processing of the same noisy averages, so they cost no privacy
(Reddi et al., "Adaptive Federated Optimization", ICLR 2021). A server is its own configuration: `[server] kind =
"momentum"` in a run file. `step` takes a `State` and a `NoisyAverage` and nothing else, so that data of users without
noise cannot get into a model.

Paper: McMahan, Ramage, Talwar and Zhang, "Learning Differentially Private Recurrent Language Models" (ICLR 2018),
Algorithm 1. The same algorithm in plain torch, without this package: examples/dp_fedavg_plain.py (tests/agreement
compares the two).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unheard.config import require
from unheard.corpus.store import UserTokens
from unheard.engines.engine import Cohort, Engine
from unheard.mechanism.aggregation import NoisyAverage
from unheard.mechanism.correlated import CorrelatedNormals
from unheard.mechanism.noise import Normals
from unheard.mechanism.plan import RoundPlan
from unheard.mechanism.sampling import ExampleSampling, Turn
from unheard.models.model import LanguageModel
from unheard.randomness import Streams
from unheard.updates.user_update import StoredExamples, StoredUsers


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of training between two rounds. Public: it is computed from noisy values alone."""

    round: int
    """The number of completed rounds."""
    params_P: Tensor = field(repr=False)
    """The model's parameters as one vector."""
    server_memory: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """The server's moving averages (and for Adam its number of steps), by name; empty for `AddServer`."""
    clip_norm: float | None = None
    """The clip norm S of the next round if the clip is adaptive, from a noisy estimate; otherwise None."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """The input of one round of one run.

    Args:
        state: The model and the server's memory before the round. Public.
        plan: Sampling, clip, estimator and noise of this round, with every number resolved (`Plan.at`).
        model: The language model that `state.params_P` belongs to.
        server: What the server does with the noisy average.
        users: The users to draw from, usually `TokenStore.train`. Private.
        streams: The sources of randomness of the run.
        attempt: The number of entries in the run's ledger before this round is charged, including charges made before
            training. A round that is repeated after a crash has a new attempt number, so a new cohort and new noise.
        turn: With correlated noise, the group of users that takes part in this attempt; otherwise None.
        normals: The noise of the attempt if the caller has it already: correlated noise, or noise that was drawn ahead
            from the attempt's stream. None draws it from `streams`.
    """

    state: State
    plan: RoundPlan
    model: LanguageModel
    server: "Server"
    users: UserTokens = field(repr=False)
    streams: Streams
    attempt: int
    turn: Turn | None = None
    normals: Normals | CorrelatedNormals | None = field(default=None, repr=False)


def run_rounds(rounds: Sequence[Round], engine: Engine) -> list[State]:
    """Run one round of Algorithm 1 for each of one or more runs.

    The engine computes the users' updates; `Contribution` (mechanism/aggregation.py) clips, weights and adds them. The
    engine sums the cohorts of all runs in one call, which fills a GPU better than one run alone. The runs share
    nothing else: each has its own model, cohort, noise and ledger.

    Args:
        rounds: One round for each run. All runs have the same model.
        engine: Sums clipped user updates (engines/engine.py), on this process or on several.

    Returns:
        The next state of each run, in the order of `rounds`.
    """
    cohorts = [draw_cohort(r) for r in rounds]
    # The noise does not depend on the users: it is drawn on another thread while the engine works.
    normals = [draw_normals(r, engine.device) for r in rounds]
    sums = engine.sum_cohorts(cohorts) if cohorts else []
    states = []
    for r, cohort_sum, drawn in zip(rounds, sums, normals, strict=True):
        average = r.plan.average(cohort_sum)
        noisy = r.plan.noise.add(average, drawn)  # pyright: ignore[reportArgumentType]
        is_adaptive = r.plan.adaptive_clip is not None
        clip_norm = r.plan.next_norm(cohort_sum, r.streams.count(r.attempt)) if is_adaptive else None
        # DP: nothing below this line has seen a user.
        state = step(r.server, r.model, r.state, noisy)
        states.append(replace(state, clip_norm=clip_norm))
    return states


def draw_cohort(r: Round) -> Cohort:
    """Draw the cohort of a round. Private. The engine reads the users' text later, when it sums their updates."""
    if isinstance(r.plan.sampling, ExampleSampling):
        unroll = r.plan.update.unroll
        lengths_U = r.users.lengths()
        drawn = r.plan.sampling.draw_examples(lengths_U, unroll, r.plan.population, r.streams.sampling(r.attempt))
        users = StoredExamples(r.users, *drawn, unroll)
    else:
        turn = {} if r.turn is None else {"turn": r.turn}
        drawn_U = r.plan.sampling.draw(r.users.num_users, r.plan.population, r.streams.sampling(r.attempt), **turn)
        users = StoredUsers(r.users, drawn_U, with_features=bool(r.model.user_features))
    return Cohort(params_P=r.state.params_P, users=users, plan=r.plan, rng=r.streams.batches(r.attempt))


def draw_normals(r: Round, device: torch.device) -> Normals | CorrelatedNormals:
    """Return the noise of the round, or start to draw it on other threads.

    Args:
        r: The round.
        device: Where the engine computes.

    Returns:
        `r.normals` if the caller has drawn the noise; otherwise a handle of the draw, which runs on other threads. If
        the server adds no noise, an unused random generator.
    """
    if r.normals is not None:
        return r.normals
    return r.plan.noise.ahead(r.streams.noise(r.attempt), r.plan.layout.total, device, r.plan.noise_units)


@dataclass(frozen=True, kw_only=True)
class AddServer:
    """The paper's server: theta <- theta + average.

    >>> AddServer()
    AddServer()
    """

    def direction(self, average_P: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the noisy average itself as the step to add to the parameters, and the memory unchanged."""
        return average_P, memory


@dataclass(frozen=True, kw_only=True)
class MomentumServer:
    """A server with momentum: v <- momentum * v + average; theta <- theta + learning_rate * v.

    >>> MomentumServer(momentum=0.8).learning_rate
    1.0

    Args:
        learning_rate: Factor of the step, above 0.
        momentum: Factor by which the velocity v of the earlier rounds is multiplied in each round, in [0, 1).
    """

    learning_rate: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        require(self.learning_rate > 0, "learning_rate must be above 0.")
        require(0 <= self.momentum < 1, "momentum must be in [0, 1).")

    def direction(self, average_P: Tensor, memory: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the step to add to the parameters, and the server's next memory (the velocity)."""
        velocity_P = self.momentum * memory.get("velocity", torch.zeros_like(average_P)) + average_P
        return self.learning_rate * velocity_P, {"velocity": velocity_P}


@dataclass(frozen=True, kw_only=True)
class AdamServer:
    """Adam on the noisy average (FedAdam), with bias correction.

    >>> AdamServer(learning_rate=0.02).beta2
    0.99

    Args:
        learning_rate: Factor of the step, above 0.
        beta1: Decay of the moving average of the noisy averages, in [0, 1).
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
        """Return the step to add to the parameters, and the server's next memory (steps and both moving averages)."""
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
"""The classes of servers, by the `kind` that names them in a run file."""


def step(server: Server, model: LanguageModel, state: State, noisy: NoisyAverage) -> State:
    """Apply the server's step to the model and return the state after the round.

    The returned state has no `clip_norm`; `run_rounds` sets it.

    Args:
        server: The rule by which the average becomes a step.
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
