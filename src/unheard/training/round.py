"""One round of Algorithm 1: draw a cohort, learn from it, forget it.

In: the public state and the private users. Out: the next public state. The caller has charged the ledger before it calls.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from unheard.corpus.store import UserTokens
from unheard.engines.engine import Cohort, Engine
from unheard.mechanism.noise import Normals
from unheard.mechanism.plan import RoundPlan
from unheard.mechanism.values import CohortSum
from unheard.models.model import LanguageModel
from unheard.randomness import Streams
from unheard.training.server import Server, step
from unheard.training.state import State
from unheard.updates.user import User


def draw_cohort(
    state: State, plan: RoundPlan, model: LanguageModel, users: UserTokens, streams: Streams, attempt: int
) -> Cohort:
    """Who is heard this round, and what they wrote."""
    drawn = plan.sampling.draw(users.num_users, plan.population, streams.sampling(attempt))
    return Cohort(
        params_P=state.params_P, users=read_users(users, drawn, model), plan=plan, rng=streams.batches(attempt)
    )


def learn(
    state: State,
    plan: RoundPlan,
    model: LanguageModel,
    server: Server,
    total: CohortSum,
    normals: Normals,
    count_rng: np.random.Generator,
) -> State:
    """The next model, from the cohort's sum; and the next S, where it follows the users."""
    average = plan.average(total)
    noisy = plan.noise.add(average, normals)
    clip_norm = plan.next_norm(total, count_rng)
    # DP: nothing below this line has seen a user.
    return replace(step(server, model, state, noisy), clip_norm=clip_norm)


def run_round(
    state: State,
    plan: RoundPlan,
    model: LanguageModel,
    server: Server,
    users: UserTokens,
    engine: Engine,
    streams: Streams,
    attempt: int,
) -> State:
    """Draw a cohort, learn from it, forget it."""
    cohort = draw_cohort(state, plan, model, users, streams, attempt)
    total = engine.sum_updates(cohort.params_P, cohort.users, cohort.plan, cohort.rng)
    return learn(state, plan, model, server, total, streams.noise(attempt), streams.count(attempt))


def read_users(users: UserTokens, cohort: np.ndarray, model: LanguageModel) -> list[User]:
    """The cohort's text, and features if the model takes them."""
    tokens = users.users(cohort)
    if not model.user_features:
        return [User(t, None, int(k)) for t, k in zip(tokens, cohort, strict=True)]
    return [User(t, f, int(k)) for t, f, k in zip(tokens, users.features(cohort), cohort, strict=True)]


def users_in_turn(users: UserTokens, model: LanguageModel) -> Iterator[User]:
    """All users of a split in order, a few at a time."""
    for start in range(0, users.num_users, 64):
        yield from read_users(users, np.arange(start, min(start + 64, users.num_users)), model)
