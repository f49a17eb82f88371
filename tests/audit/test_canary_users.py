"""Canary users: orthogonal vectors of maximal norm that pass through the same clip and grid as every update."""

import numpy as np
import pytest
import torch

from unheard.audit.one_run import CanaryUsers
from unheard.updates.user_update import ONE


def test_every_canary_has_a_direction_of_its_own_at_the_full_norm(run):
    plan = run.plan.at(0, run.model.layout)
    users = CanaryUsers.draw(20, run.model.layout, np.random.default_rng(1))
    units_P = users.units(plan)
    assert users.norms(units_P) * plan.contribution.grid == pytest.approx(np.full(20, 2.0), rel=0.05)
    alone = users.cohort(np.array([3]), units_P, plan)
    heard = users.projections(alone.units_P.double().numpy() * plan.contribution.grid, units_P, users.norms(units_P))
    assert heard[3] == pytest.approx(2.0, rel=0.05)
    assert np.abs(np.delete(heard, 3)).max() == 0


def test_canaries_contribute_what_the_clip_and_grid_let_through(run):
    """The sum of the selected canaries equals, to the unit, the sum of their deltas by `of_users`."""
    plan = run.plan.at(0, run.model.layout)
    users = CanaryUsers.draw(7, run.model.layout, np.random.default_rng(1))
    units_P = users.units(plan)
    drawn = np.array([0, 2, 5])
    loud = torch.from_numpy(np.stack([np.where(users.owner_P == k, 1e6 * users.sign_P, 0.0) for k in drawn]))
    through = plan.contribution.of_users(loud, np.full(3, ONE))
    selected = users.cohort(drawn, units_P, plan)
    assert selected.weight == through.weight == 3.0
    assert ((through.units_P != 0) == (selected.units_P != 0)).all()
