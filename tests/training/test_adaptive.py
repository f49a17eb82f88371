"""Adaptive clipping: S converges to the quantile, survives checkpoints, and is the same in every engine."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import unheard
from unheard.audit.verification import verify
from unheard.engines.choice import EngineChoice
from unheard.mechanism.aggregation import Contribution
from unheard.privacy.events import PoissonGaussian
from unheard.privacy.ledger import Ledger
from unheard.randomness import reproducible_generator
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import newest_checkpoint
from unheard.updates.user_update import read_users


def adaptive(run, initial_norm, rounds, **more) -> unheard.Run:
    return replace(
        run,
        plan=replace(
            run.plan,
            clip=unheard.AdaptiveClip(initial_norm=initial_norm, learning_rate=0.5, **more),
            noise=unheard.GaussianNoise(noise_multiplier=0.5),
            sampling=unheard.PoissonSampling(sampling_prob=0.5),
            update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=0.02),
        ),
        training=unheard.Training(rounds=rounds, checkpoint_every=5, reproducible_seed=4),
        evaluation=unheard.Evaluation(every=100, max_tokens=50, unroll=20),
    )


def followed(folder) -> float:
    norm = newest_checkpoint(RunFolder(folder)).state.clip_norm
    assert norm is not None
    return norm


def norms_of_users(run, store, params_P) -> np.ndarray:
    """Return the norm of each user's update without a clip. With one local step this is the norm that is clipped."""
    plan = replace(run.plan, clip=unheard.NoClip(), noise=unheard.NoNoise()).at(0, run.model.layout)
    engine = EngineChoice(kind="reference").build(run.model)
    users = read_users(store.train, np.arange(store.train.num_users), False)
    assert all(len(plan.update.batches(user, 0)) == 1 for user in users)
    return np.array([engine.user_update(params_P, user, plan, 0).norm().item() for user in users])


@pytest.mark.parametrize("beginning", [0.002, 0.3])
def test_s_reaches_the_true_quantile_of_the_users_from_above_and_from_below(run, store, tmp_path, beginning):
    following = adaptive(run, beginning, rounds=24, count_noise_std=1.0)
    one_step = unheard.FedAvg(batch_size=40, unroll=5, learning_rate=0.02)
    following = replace(following, plan=replace(following.plan, update=one_step))
    list(unheard.train(following, tmp_path / "r"))
    norms = norms_of_users(following, store, newest_checkpoint(RunFolder(tmp_path / "r")).state.params_P)
    assert (norms <= followed(tmp_path / "r")).mean() == pytest.approx(0.5, abs=0.2)


def test_the_ledger_has_one_event_a_round_at_the_declared_z_and_the_folder_fits(run, tmp_path):
    list(unheard.train(adaptive(run, 0.1, rounds=3), tmp_path / "r"))
    events = Ledger.read(tmp_path / "r" / "ledger.jsonl").events
    assert len(events) == 3
    assert len(set(events)) == 1
    assert isinstance(events[0], PoissonGaussian)
    assert events[0].noise_multiplier == pytest.approx(0.5, rel=1e-12)
    assert [f.name for f in verify(tmp_path / "r") if f.fits is not True] == []


def test_a_stop_and_a_resume_continue_with_the_same_s(run, tmp_path):
    following = adaptive(run, 0.1, rounds=6)
    list(unheard.train(following, tmp_path / "whole"))
    for report in (stopped := unheard.train(following, tmp_path / "parts")):
        if report.round == 3:
            break
    stopped.close()
    assert followed(tmp_path / "parts") != 0.1
    list(unheard.resume(tmp_path / "parts"))
    assert followed(tmp_path / "parts") == followed(tmp_path / "whole")


@pytest.mark.parametrize("S", [0.001, 0.02, 10.0])
def test_every_engine_counts_the_same_users_as_unclipped(run, store, S):
    """At 0.02 some users are clipped in every step, some in none, and two in an early step but not in the last."""
    plan = adaptive(run, S, rounds=1).plan.at(0, run.model.layout)
    users = read_users(store.train, np.arange(30), False)
    params_P = run.model.initial(1)
    counted = {
        kind: EngineChoice(kind=kind)
        .build(run.model)
        .sum_updates(params_P, users, plan, reproducible_generator(1))
        .balance
        for kind in ("reference", "vectorised", "stacked")
    }
    assert len(set(counted.values())) == 1, counted
    assert counted["reference"] == {0.001: -30, 0.02: 6, 10.0: 30}[S]


def test_a_clip_that_stays_is_not_counted(run, store):
    plan = run.plan.at(0, run.model.layout)
    users = read_users(store.train, np.arange(5), False)
    for kind in ("reference", "vectorised", "stacked"):
        engine = EngineChoice(kind=kind).build(run.model)
        assert engine.sum_updates(run.model.initial(1), users, plan, reproducible_generator(1)).balance is None


def test_one_user_moves_update_and_count_together_by_no_more_than_the_charged_z_allows(run):
    """The two parts of one release, each in deviations of its noise: sqrt(1/z_delta^2 + 1/(2 sigma_b)^2) = 1/z."""
    plan = adaptive(run, 0.7, rounds=1, count_noise_std=1.5).plan.at(0, run.model.layout)
    contribution: Contribution = plan.contribution
    rng = np.random.default_rng(2)
    for _ in range(20):
        delta_1P = torch.from_numpy(rng.standard_normal((1, run.model.layout.total)))
        bit = torch.tensor([bool(rng.integers(2))])
        alone = contribution.of_users(delta_1P, np.array([2**30]), bit)
        average = plan.average(alone)
        update = average.average_P.norm().item() / plan.noise.std(plan.sensitivity)
        assert alone.balance is not None
        count = abs(alone.balance) / 2 / plan.count_noise_std
        assert np.hypot(update, count) <= 1 / plan.event().noise_multiplier * (1 + 1e-9)
    assert contribution.sum([], 3).balance == 0
