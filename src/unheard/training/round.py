"""One round of the paper's Algorithm 1: draw a cohort, sum its clipped updates, average, add noise, step the server.

`run_rounds` is the round that training runs: the loop (training/loop.py) calls it for one run and for several runs at
the same time, on one process and on many. The caller charges each round to the ledger before it calls `run_rounds`.

    rounds = [Round(state=state, plan=plan, model=model, server=server, users=store.train, streams=streams, attempt=0)]
    [next_state] = run_rounds(rounds, engine)

Input: for each run its public state, the plan of the round, and its private users. Output: the next public states. The
types of the intermediate values say who may see them (mechanism/aggregation.py): `CohortSum` and `BoundedAverage` are
private, `NoisyAverage` and `State` are public.

Paper: McMahan, Ramage, Talwar and Zhang, "Learning Differentially Private Recurrent Language Models" (ICLR 2018),
Algorithm 1. The same algorithm in plain torch, without this package: examples/dp_fedavg_plain.py (tests/agreement
compares the two).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from unheard.corpus.store import UserTokens
from unheard.engines.engine import Cohort, Engine
from unheard.mechanism.correlated import CorrelatedNormals
from unheard.mechanism.noise import Normals
from unheard.mechanism.plan import RoundPlan
from unheard.mechanism.sampling import ExampleSampling, Turn
from unheard.models.model import LanguageModel
from unheard.randomness import Streams
from unheard.training.server import Server, State, step
from unheard.updates.user_update import StoredExamples, StoredUsers


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
        attempt: The number of rounds that the run has charged before this one. A round that is repeated after a crash
            has another attempt number and so draws another cohort and other noise.
        turn: With correlated noise, whose turn it is; else None.
        normals: The noise of the attempt, if the caller has it already: correlated noise, or normals of the attempt's
            stream that were drawn ahead. None: they are drawn from `streams`.
    """

    state: State
    plan: RoundPlan
    model: LanguageModel
    server: Server
    users: UserTokens = field(repr=False)
    streams: Streams
    attempt: int
    turn: Turn | None = None
    normals: Normals | CorrelatedNormals | None = field(default=None, repr=False)


def run_rounds(rounds: Sequence[Round], engine: Engine) -> list[State]:
    """Run one round of Algorithm 1 for each of one or more runs.

    The engine sums the cohorts of all runs in one call, which fills a GPU better than one run alone. The runs share
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
    for r, cohort_sum, normals_P in zip(rounds, sums, normals, strict=True):
        average = r.plan.average(cohort_sum)
        noisy = r.plan.noise.add(average, normals_P)  # pyright: ignore[reportArgumentType]
        is_adaptive = r.plan.adaptive_clip is not None
        clip_norm = r.plan.next_norm(cohort_sum, r.streams.count(r.attempt)) if is_adaptive else None
        # DP: nothing below this line has seen a user.
        state = step(r.server, r.model, r.state, noisy)
        states.append(replace(state, clip_norm=clip_norm))
    return states


def draw_cohort(r: Round) -> Cohort:
    """Draw the users of a round. The engine reads their text later, when it sums their updates."""
    if isinstance(r.plan.sampling, ExampleSampling):
        unroll = r.plan.update.unroll
        lengths_U = r.users.lengths()
        drawn = r.plan.sampling.draw_examples(lengths_U, unroll, r.plan.population, r.streams.sampling(r.attempt))
        examples = StoredExamples(r.users, *drawn, unroll)
        return Cohort(params_P=r.state.params_P, users=examples, plan=r.plan, rng=r.streams.batches(r.attempt))
    turn = {} if r.turn is None else {"turn": r.turn}
    drawn_U = r.plan.sampling.draw(r.users.num_users, r.plan.population, r.streams.sampling(r.attempt), **turn)
    users = StoredUsers(r.users, drawn_U, with_features=bool(r.model.user_features))
    return Cohort(params_P=r.state.params_P, users=users, plan=r.plan, rng=r.streams.batches(r.attempt))


def draw_normals(r: Round, device: torch.device) -> Normals | CorrelatedNormals:
    """Start drawing the round's standard normals on another thread; without noise, return the generator unused."""
    if r.normals is not None:
        return r.normals
    return r.plan.noise.ahead(r.streams.noise(r.attempt), r.plan.layout.total, device)
