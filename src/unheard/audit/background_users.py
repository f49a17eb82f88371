"""Adds the users of the store to the one-run audit, so that the canary users are audited among real updates.

`BackgroundUsers` accompanies `audit/one_run.py`. In each round it draws a cohort from the store, computes its updates
with the engine and adds their sum to that of the canaries; after the noise it applies the server's step, so that the
model trains as it does in a real run. Without background users the audit reads no text and charges nothing.

An audit with background users publishes a function of noisy averages, so it is a release like any training run. Every
round is charged to the ledger of the store's population before a user is drawn.
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
class BackgroundUsers:
    """The users of a store during an audit, and the model that they train.

    Creating the object registers the audit in the population's ledger as a run of its own.

    Attributes:
        run: The run that is audited.
        store: The token store of its users.
        engine: Computes the updates of a cohort.
        streams: Randomness of the audit.
        population: The ledger that every round is charged to.
        name: The name of the audited run; the ledger lists "an audit of <name>".
        state: The model and the server's state after the rounds so far.
    """

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
        """Charges one round, then draws a cohort and returns the sum of its updates and those of the canaries.

        Args:
            canaries: The sum over the canaries drawn in this round.
            plan: The plan of this round.
            event: The privacy event of this round.
            round: The number of the round, from 0.
        """
        # DP: an audit among people is a run on them: charged before anybody is drawn.
        self.population.charge(self.id, round, event, round)
        # A stream of its own: the canaries' cohort is drawn from `streams.sampling`, and no generator may serve two
        # cohorts.
        rng = self.streams.batches(round)
        cohort = plan.sampling.draw(self.store.train.num_users, plan.population, rng)
        stored = StoredUsers(self.store.train, cohort, with_features=bool(self.run.model.user_features))
        users = self.engine.sum_updates(self.state.params_P, stored, plan, rng)
        return plan.contribution.sum([canaries, replace(users, units_P=users.units_P.cpu())], plan.layout.total)

    def learn(self, noisy: NoisyAverage) -> None:
        """Applies the server's step with the noisy average of the round."""
        self.state = step(self.run.server, self.run.model, self.state, noisy)
