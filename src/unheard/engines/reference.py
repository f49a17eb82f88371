"""The reference engine: a loop over users that follows the paper's UserUpdate line by line.

The code is simple rather than fast, because every other engine is tested against it (tests/agreement). It implements
UserUpdateFedAvg and UserUpdateFedSGD of Algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unheard.engines.engine import Cohort, Drawn
from unheard.mechanism.aggregation import CohortSum
from unheard.mechanism.clipping import clip_
from unheard.mechanism.plan import RoundPlan
from unheard.models.model import LanguageModel, loss_gradient
from unheard.updates.user_update import User


@dataclass(frozen=True)
class ReferenceEngine:
    """An engine that computes one user after the other, in the precision of the parameters.

    Args:
        model: Any language model.
        device: The device on which it computes.
        users_at_once: Without effect: users are computed one at a time.
        precision: Without effect, except that `unsupported` refuses "bfloat16".
    """

    model: LanguageModel
    device: torch.device = torch.device("cpu")
    users_at_once: int | None = None
    precision: str = "auto"

    @classmethod
    def unsupported(cls, model: LanguageModel, precision: str) -> str | None:
        """Return an error message for bfloat16, else None. Every model is supported (see `EngineClass.unsupported`)."""
        if precision == "bfloat16":
            return "The engine 'reference' does not compute in bfloat16: leave precision out, or choose another engine."
        return None

    def sum_updates(
        self, params_P: Tensor, users: Sequence[User], plan: RoundPlan, rng: np.random.Generator | Drawn
    ) -> CohortSum:
        """Return the sum of the users' clipped updates, computed one user at a time (see `Engine.sum_updates`)."""
        params_P = params_P.to(self.device)
        seed = int(rng.integers(2**63))
        each = []
        for user in users:
            unclipped = torch.tensor(True, device=self.device) if plan.adaptive_clip else None
            delta_P = self.user_update(params_P, user, plan, seed, unclipped)
            weight_units = plan.weights.units(np.array([len(user.tokens)]))
            each.append(plan.contribution.of_users(delta_P[None], weight_units, unclipped))
        return plan.contribution.sum(each, self.model.layout.total)

    def sum_cohorts(self, cohorts: Sequence[Cohort]) -> list[CohortSum]:
        """Return the sum of each cohort, computed one cohort after the other (see `Engine.sum_cohorts`)."""
        return [self.sum_updates(c.params_P, c.users, c.plan, c.rng) for c in cohorts]

    def user_update(
        self, theta0_P: Tensor, user: User, plan: RoundPlan, seed: int, unclipped: Tensor | None = None
    ) -> Tensor:
        """Compute the update of one user: UserUpdateFedAvg(k, theta0, ClipFn) of the paper. FedSGD has one batch.

        Args:
            theta0_P: The parameters at the beginning of the round.
            user: User k, with their text.
            plan: The plan of the round.
            seed: The seed of FedSGD's batches.
            unclipped: A bool tensor that is set to False in place if a local step is clipped.

        Returns:
            delta_k = theta - theta0 after the user's local steps, [P].
        """
        features_F = None if user.features is None else torch.as_tensor(user.features, device=self.device)
        theta_P = theta0_P.clone()
        for batch_BW in plan.update.batches(user, seed):
            window_BW = torch.as_tensor(batch_BW, device=self.device)
            gradient_P = loss_gradient(self.model, theta_P, window_BW, features_F)
            gradient_P += plan.update.update_penalty * (theta_P - theta0_P)
            theta_P = self.model.project_local(theta_P - plan.update.learning_rate * gradient_P)
            # The paper clips after every local step. The guarantee does not rest on this clip: mechanism/aggregation
            # clips the returned delta again.
            theta_P = theta0_P + clip_(theta_P - theta0_P, plan.contribution.balls, unclipped)
        return theta_P - theta0_P
