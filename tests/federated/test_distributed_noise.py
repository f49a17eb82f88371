"""Noise of the nodes: its size with the fewest nodes allowed, refused plans, two epsilons, abandoned rounds."""

import json
import math
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")
import dp_accounting
from dp_accounting import pld
from scipy import stats

import unheard
from tests.federated.network import LocalNetwork, divided, federated, plain
from tests.federated.test_server import SECURE, one_round, seeded, sum_of
from unheard.engines.choice import EngineChoice
from unheard.errors import InvalidValue, LedgerError, NodeError, PrivacyError, UnprovenCombination
from unheard.mechanism import noise
from unheard.mechanism.aggregation import BoundedAverage
from unheard.mechanism.noise import SMALLEST_SHARE, DistributedGaussianNoise
from unheard.privacy.events import (
    CorrelatedGaussian,
    DistributedGaussian,
    Gaussian,
    PoissonGaussian,
    against_server,
    from_record,
    to_record,
)
from unheard.privacy.ledger import Ledger
from unheard.privacy.statement import compute_statement, render_text
from unheard.privacy.statement_formats import report_data
from unheard.randomness import secure_generator

NOISE = DistributedGaussianNoise(noise_multiplier=1.0, min_parties=4)
CHOICE = replace(SECURE, parties=6)


def test_the_shares_of_the_fewest_have_the_charged_noise():
    scale = 1.5 * 2**20
    shares = sum(NOISE.share(secure_generator(), 20_000, 1.5, 2.0**-20) for _ in range(4))
    assert abs(shares.std() / scale - 1) < 0.03  # 6 deviations
    assert stats.kstest(shares / scale, "norm").pvalue > 1e-6
    assert NOISE.share_std(1.5, 2.0**-20) * 2 >= scale
    again = NOISE.share(secure_generator(), 20_000, 1.5, 2.0**-20)
    assert abs(np.corrcoef(again, shares)[0, 1]) < 0.05


def test_the_shares_are_never_narrower_than_the_charged_noise_by_a_rounding_of_float64():
    for k in range(1, 400):
        z, bound, parties = k / 7, 1 + k / 13, 2 + k % 97
        share = Fraction(DistributedGaussianNoise(noise_multiplier=z, min_parties=parties).share_std(bound, 2.0**-20))
        assert share**2 * parties >= (Fraction(z) * Fraction(bound) * 2**20) ** 2


def test_the_sum_of_rounded_gaussians_is_one_gaussian_plus_noise_that_does_not_depend_on_the_data():
    """Checks the identity of the proof by convolution: the sum of m shares has the distribution of round(X + V)."""
    std, m, reach = 8.0, 3, 400  # narrower than allowed: the distance is exp(-pi^2 std^2 / 2) and still far below 1e-15
    k = np.arange(-reach, reach + 1)
    one = np.diff(stats.norm.cdf(np.append(k - 0.5, reach + 0.5), scale=std))
    shares = np.convolve(np.convolve(one, one, "same"), one, "same")
    # X ~ N(0, m std^2), V the sum of m - 1 uniforms on [-1/2, 1/2]: a triangle, integrated on a fine grid.
    v, w = np.polynomial.legendre.leggauss(60)
    density = np.zeros(len(k))
    for half in (-1, 1):
        at = half * (v + 1) / 2
        weight = w / 2 * (1 - np.abs(at))
        for a, b in zip(at, weight, strict=True):
            wide = math.sqrt(m) * std
            density += b * (stats.norm.cdf(k + 0.5 - a, scale=wide) - stats.norm.cdf(k - 0.5 - a, scale=wide))
    assert np.abs(shares - density).max() < 1e-13
    assert math.exp(-(math.pi**2) * SMALLEST_SHARE**2 / 2) == 0.0  # below the smallest float64


def test_the_modulus_is_chosen_for_all_users_and_the_noise_of_all_nodes(run, monkeypatch):
    asked = []

    def bits(users, is_noised, noise_std, parameters, nodes):
        asked.append((users, is_noised, noise_std, parameters, nodes))
        return 64

    monkeypatch.setattr("unheard.federated.secure_aggregation.modulus_bits", bits)
    run = seeded(run, noise=NOISE)
    one_round(run, LocalNetwork(divided(run.corpus, 6)), CHOICE)
    plan = run.plan.at(0, run.model.layout)
    of_four = plan.contribution.l2_bound / plan.contribution.grid  # z = 1 with the shares of 4 nodes
    [(users, is_noised, noise_std, parameters, nodes)] = asked
    assert (users, is_noised, parameters, nodes) == (60, True, plan.layout.total, 6)
    assert noise_std == pytest.approx(of_four * math.sqrt(6 / 4), rel=1e-9)


def test_the_round_has_the_nodes_noise_and_the_server_adds_none(run):
    run = seeded(run, noise=NOISE)
    _, total, numbers = one_round(run, LocalNetwork(divided(run.corpus, 6)), CHOICE)
    plan = run.plan.at(0, run.model.layout)
    noise = (total.units_P - sum_of(run, numbers).units_P).numpy()
    wanted = plan.contribution.l2_bound / plan.contribution.grid
    assert abs(noise.std() / (wanted * math.sqrt(6 / 4)) - 1) < 0.15
    average = plan.average(total)
    noisy = plan.noise.add(average, np.random.default_rng(1))
    np.testing.assert_array_equal(noisy.average_P, average.average_P)
    assert total.weight == 0.0  # no exact weight is sent


@pytest.mark.parametrize("lost", [0, 2])
def test_a_sum_states_the_noise_of_the_nodes_that_finished(run, lost):
    def tamper(node, request, answer):
        return None if request.kind == "masked" and node < 1000 + lost else answer

    run = seeded(run, noise=NOISE)
    _, total, _ = one_round(run, LocalNetwork(divided(run.corpus, 6), tamper), CHOICE)
    share = NOISE.share_std(total.l2_bound, total.grid)
    assert total.added_noise == pytest.approx(share * math.sqrt(6 - lost), rel=1e-12)


def test_a_sum_without_the_nodes_noise_is_never_released():
    average = BoundedAverage(units_P=np.zeros(2), unit=1.0, sensitivity=1.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PrivacyError, match="this sum has none"):
        NOISE.add(average, np.random.default_rng(1))
    with pytest.raises(PrivacyError):
        NOISE.add(replace(average, added_noise=0.99), np.random.default_rng(1))
    for unit in (0.25, 8.0):  # the nodes' noise is in units of the sum, sigma in units of the parameters
        scaled = BoundedAverage(units_P=torch.zeros(2, dtype=torch.int64), unit=unit, sensitivity=1.23456)
        enough = NOISE.std(1.23456) / unit
        assert NOISE.add(replace(scaled, added_noise=enough), np.random.default_rng(1)).noise_std == 1.23456
        with pytest.raises(PrivacyError, match="this sum has none"):
            NOISE.add(replace(scaled, added_noise=math.nextafter(enough, 0)), np.random.default_rng(1))


def test_plain_training_and_central_mode_refuse_distributed_noise(run, tmp_path):
    run = seeded(run, noise=NOISE)
    with pytest.raises(PrivacyError, match="--on flower"):
        plain(run, tmp_path / "plain")
    with pytest.raises(PrivacyError, match="secure_aggregation = true"):
        federated(run, tmp_path / "central", LocalNetwork(divided(run.corpus, 6)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "parts",
    [
        dict(estimator=unheard.ClippedDenominator(min_total_weight=30.0)),
        dict(clip=unheard.AdaptiveClip(initial_norm=1.0)),
    ],
)
def test_parts_that_need_exact_counts_are_refused(run, parts):
    with pytest.raises(UnprovenCombination, match="covers the sum"):
        seeded(run, noise=NOISE, **parts)


@pytest.mark.parametrize("narrow_from", [0, 1, 2])
def test_every_phase_of_a_run_needs_shares_that_are_wide_enough(run, tmp_path, narrow_from):
    """The run is refused before anything is charged, also if only a later phase has too little noise."""
    wide = tuple(unheard.Change(from_round=r, noise_multiplier=2.0) for r in range(1, narrow_from))
    narrow = (unheard.Change(from_round=narrow_from, noise_multiplier=1e-5),) if narrow_from else ()
    noise = NOISE if narrow_from else replace(NOISE, noise_multiplier=1e-5)
    planned = seeded(run, noise=noise, schedule=(*wide, *narrow))
    with pytest.raises(UnprovenCombination, match="units wide"):
        federated(planned, tmp_path / "r", LocalNetwork(divided(run.corpus, 6)), CHOICE)
    assert not list(tmp_path.iterdir())


def test_shares_that_are_too_narrow_for_the_proof_are_refused():
    with pytest.raises(UnprovenCombination, match="units wide"):
        replace(NOISE, min_parties=2**31).share_std(1.0, 2.0**-20)
    with pytest.raises(InvalidValue, match="at least 2"):
        DistributedGaussianNoise(noise_multiplier=1.0, min_parties=1)


def test_a_share_of_exactly_the_smallest_width_is_allowed(monkeypatch):
    monkeypatch.setattr(noise, "SMALLEST_SHARE", NOISE.share_std(1.0, 2.0**-20))
    assert NOISE.share_std(1.0, 2.0**-20) == noise.SMALLEST_SHARE
    with pytest.raises(UnprovenCombination, match="units wide"):
        NOISE.share_std(math.nextafter(1.0, 0.0), 2.0**-20)


def test_with_too_few_survivors_the_round_is_abandoned_unmasked_by_nobody_and_its_charge_stays(run, tmp_path):
    def tamper(node, request, answer):
        return None if request.kind == "masked" and node in (1000, 1001, 1002) else answer

    network = LocalNetwork(divided(run.corpus, 6), tamper)
    run = seeded(run, rounds=2, noise=NOISE)
    with pytest.warns(RuntimeWarning, match="4 nodes must finish"):
        model = federated(run, tmp_path / "out", network, CHOICE)
    np.testing.assert_array_equal(model, run.model.project(run.model.initial(run.training.init_seed)))
    assert len(Ledger.read(tmp_path / "out" / "ledger.jsonl")) == 2
    assert not [request for _, request in network.requests if request.kind == "reveal"]


def test_with_too_few_nodes_at_the_first_stage_nobody_is_asked_for_more(run):
    """Three of six nodes answer, and the noise was planned for four."""

    def tamper(node, request, answer):
        return answer if request.kind == "describe" or node < 1003 else None

    network = LocalNetwork(divided(run.corpus, 6), tamper)
    words = "The round was charged, and is abandoned: 4 nodes must finish each stage, and fewer did."
    # The message says neither how many were drawn nor how many answered.
    with pytest.warns(RuntimeWarning, match=f"^{re.escape(words)}$"):
        one_round(seeded(run, noise=NOISE), network, CHOICE)
    assert {request.kind for _, request in network.requests} == {"describe", "keys"}


def test_the_ledger_holds_the_event_and_the_statement_gives_two_epsilons(run, tmp_path):
    run = seeded(run, rounds=2, noise=NOISE)
    federated(run, tmp_path / "out", LocalNetwork(divided(run.corpus, 6)), CHOICE)
    ledger = Ledger.read(tmp_path / "out" / "ledger.jsonl")
    event = DistributedGaussian(sampling_prob=0.2, noise_multiplier=1.0, min_parties=4)
    assert ledger.events == [event, event]
    stated = compute_statement(ledger.facts, ledger.entries)
    assert stated["against_server"]["epsilon"] > 2 * stated["claimed"]["epsilon"]
    assert "against server" in render_text(stated)
    # Recomputed by dp-accounting alone, from the lines of the ledger's file.
    lines = [json.loads(line) for line in (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()]
    by_line = {"claimed": pld.PLDAccountant(), "against_server": pld.PLDAccountant()}
    for record in [line["event"] for line in lines if "event" in line]:
        noise = dp_accounting.GaussianDpEvent(record["noise_multiplier"])
        by_line["claimed"].compose(dp_accounting.PoissonSampledDpEvent(record["sampling_prob"], noise))
        by_line["against_server"].compose(noise)
    for name, accountant in by_line.items():
        assert stated[name]["epsilon"] == pytest.approx(accountant.get_epsilon(run.claimed_delta), rel=1e-3)


def test_the_event_reads_back_and_the_server_gets_no_amplification():
    event = DistributedGaussian(sampling_prob=0.1, noise_multiplier=2.0, min_parties=5)
    assert from_record(to_record(event)) == event
    assert against_server(event) == Gaussian(noise_multiplier=2.0)
    assert "server adds" in against_server(PoissonGaussian(sampling_prob=0.1, noise_multiplier=2.0)).reason
    with pytest.raises(LedgerError):
        from_record({**to_record(event), "min_parties": 0})


def test_the_same_seed_gives_other_noise_of_the_nodes(run, tmp_path):
    """The nodes' noise does not depend on the server's seed; otherwise the server could subtract it."""
    run = seeded(run, rounds=1, noise=NOISE)
    models = [federated(run, tmp_path / name, LocalNetwork(divided(run.corpus, 6)), CHOICE) for name in "ab"]
    assert (models[0] != models[1]).mean() > 0.9


def test_three_abandoned_rounds_in_a_row_stop_the_run(run, tmp_path):
    network = LocalNetwork(divided(run.corpus, 6), lambda n, request, a: None if request.kind == "keys" else a)
    with pytest.warns(RuntimeWarning), pytest.raises(NodeError, match="in a row"):
        federated(seeded(run, rounds=5, noise=NOISE), tmp_path / "out", network, EngineChoice(secure_aggregation=True))


def test_nodes_of_which_nobody_was_drawn_add_their_noise_too(run):
    run = seeded(run, noise=NOISE, sampling=unheard.PoissonSampling(sampling_prob=1e-9))
    _, total, numbers = one_round(run, LocalNetwork(divided(run.corpus, 6)), CHOICE)
    assert not len(numbers)
    wanted = NOISE.share_std(total.l2_bound, total.grid) * math.sqrt(6)
    assert abs(total.units_P.double().std() / wanted - 1) < 0.15
    assert total.added_noise == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("q", [0.1, 1.0])
def test_noise_that_a_server_added_before_hides_nothing_from_it(q):
    """The run on nodes began from a run with correlated noise, whose server knows that noise."""
    earlier = CorrelatedGaussian(sampling_prob=q, noise_multiplier=9.0, block=2, index=0)
    own = DistributedGaussian(sampling_prob=1.0, noise_multiplier=9.0, min_parties=4)
    facts = {"population": 1000, "delta": 1e-6, "start": {"charges": 1}}
    alone, both = (compute_statement(facts, events) for events in ([own], [earlier, own]))
    assert alone["against_server"]["epsilon"] < 2
    assert both["against_server"]["epsilon"] == "infinity"
    assert report_data(both)["against_server"]["true_positive_rates"][0]["at_most"] == 1.0
