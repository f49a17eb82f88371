"""The store's own people among the canaries: they are drawn, learn and are charged as in training.

In: a run, its store and an engine. Out: for each round the sum of canaries and people together. What the audit then shows is a
function of noisy averages, a release like any other: every round is charged to the people's ledger before anybody is drawn.
"""

from dataclasses import dataclass, field, replace

from unheard.corpus.store import TokenStore
from unheard.engines.engine import Engine
from unheard.mechanism.plan import RoundPlan
from unheard.mechanism.values import CohortSum, NoisyAverage
from unheard.privacy.events import Event
from unheard.privacy.population_ledger import PopulationLedger, new_run_id
from unheard.randomness import Streams
from unheard.training.initialise import first_state
from unheard.training.run import Run
from unheard.training.server import State, step
from unheard.updates.users import StoredUsers


@dataclass
class Company:
    """Goes through the rounds with the audit."""

    run: Run
    store: TokenStore
    engine: Engine
    streams: Streams
    population: PopulationLedger
    name: str
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self.state = first_state(self.run)
        self.id = new_run_id()
        facts = {
            "name": f"an audit of {self.name}",
            "delta": self.run.claimed_delta,
            "population": self.run.plan.population,
        }
        self.population.register(self.id, facts, held=0)

    def join(self, canaries: CohortSum, plan: RoundPlan, event: Event, round: int) -> CohortSum:
        # DP: an audit among people is a run on them: charged before anybody is drawn.
        self.population.charge(self.id, round, event, round)
        users = self.store.train
        # Another stream than the canaries': one generator must not be asked for two cohorts.
        rng = self.streams.batches(round)
        cohort = plan.sampling.draw(users.num_users, plan.population, rng)
        stored = StoredUsers(users, cohort, with_features=bool(self.run.model.user_features))
        users = self.engine.sum_updates(self.state.params_P, stored, plan, rng)
        return plan.contribution.sum([canaries, replace(users, units_P=users.units_P.cpu())], plan.layout.total)

    def learn(self, noisy: NoisyAverage) -> None:
        self.state = step(self.run.server, self.run.model, self.state, noisy)
