"""One round of Algorithm 1: draw a cohort, learn from it, forget it.

In: the public state and the private users. Out: the next public state. The caller has charged the ledger before it calls.
"""

from dataclasses import replace

import numpy as np

from unheard.corpus.store import UserTokens
from unheard.engines.engine import Cohort, Engine
from unheard.mechanism.noise import Normals
from unheard.mechanism.plan import RoundPlan
from unheard.mechanism.values import CohortSum
from unheard.models.model import LanguageModel
from unheard.randomness import Streams
from unheard.training.server import Server, State, step
from unheard.updates.users import StoredUsers


def draw_cohort(
    state: State, plan: RoundPlan, model: LanguageModel, users: UserTokens, streams: Streams, attempt: int
) -> Cohort:
    """Who is heard this round. What they wrote is read by whoever sums them."""
    drawn = plan.sampling.draw(users.num_users, plan.population, streams.sampling(attempt))
    stored = StoredUsers(users, drawn, with_features=bool(model.user_features))
    return Cohort(params_P=state.params_P, users=stored, plan=plan, rng=streams.batches(attempt))


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
