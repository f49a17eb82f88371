"""Smoothing, epsilon by round, computation to an accuracy, hypothetical epsilons: by hand and against the paper's words."""

import itertools
from dataclasses import replace

import pytest

from unheard.curves import smoothed
from unheard.errors import InvalidValue
from unheard.privacy.accountants import best_epsilon, epsilons
from unheard.privacy.events import NonPrivate, PoissonGaussian
from unheard.privacy.ledger import Entry
from unheard.report.compute_cost import choose_baseline, compute_costs
from unheard.report.hypothetical import hypothetical_epsilon
from unheard.report.run_record import RunRecord, accuracy_points, epsilon_points, final_accuracy


def record(
    name: str, accuracies: list[float], *, every=20, users_per_round=100.0, population=763_430, events=(), delta=1e-9
) -> RunRecord:
    metrics = [{"round": every * (i + 1), "accuracy_top1": a} for i, a in enumerate(accuracies)]
    entries = [Entry(event=event, round=i, hash="") for i, event in enumerate(events)]
    facts = {"population": population, "delta": delta, "sampling": {"users_per_round": users_per_round}}
    return RunRecord(name=name, tables={"training": {}}, facts=facts, entries=entries, metrics=metrics)


def test_smoothed_is_the_mean_of_the_last_five_and_never_of_the_future():
    assert smoothed([1, 2, 3, 4, 5, 6, 10]) == [1, 1.5, 2, 2.5, 3, 4, 5.6]
    assert smoothed([1, 2, 3], over=1) == [1, 2, 3]
    assert smoothed([]) == []


def test_a_run_ends_at_its_last_smoothed_figure():
    run = record("a", [0.1, 0.1, 0.2, 0.2, 0.2, 0.3])
    assert [p["round"] for p in accuracy_points(run)] == [20, 40, 60, 80, 100, 120]
    assert final_accuracy(run) == pytest.approx(0.2)
    assert final_accuracy(record("b", [])) is None


def test_the_papers_sixty_times_computation():
    """Section 1: 17.5 % after 4,120 rounds of 100 users, and after 4,980 rounds of about 5,000."""
    baseline = record("baseline", [0.17] * (4120 // 20 - 5) + [0.175] * 5)
    private = record("private", [0.17] * (4980 // 20 - 5) + [0.175] * 10, users_per_round=5000)
    lines = {line.run: line for line in compute_costs([baseline, private], baseline)}
    assert [lines["baseline"].rounds, lines["private"].rounds] == [4120, 4980]
    assert [lines["baseline"].updates, lines["private"].updates] == [412_000, 24_900_000]
    assert lines["private"].times == pytest.approx(60.4, abs=0.05)
    assert lines["baseline"].times == 1


def test_a_run_that_never_gets_there_says_so_with_its_best():
    good, bad = record("good", [0.2] * 5), record("bad", [0.1, 0.15, 0.1])
    lines = compute_costs([good, bad], good)
    assert [line.rounds for line in lines] == [20, None]
    assert lines[1].times is None
    assert lines[1].best == pytest.approx(0.125)


def test_the_baseline_is_the_one_asked_for_or_the_first_without_privacy():
    private = record("p", [0.1], events=[PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0)])
    plain = record("q", [0.1], events=[NonPrivate(reason="no noise is added")])
    assert choose_baseline([private, plain]) is plain
    assert choose_baseline([private]) is private
    assert choose_baseline([private, plain], "runs/p") is private
    with pytest.raises(InvalidValue, match="p, q"):
        choose_baseline([private, plain], "r")


def test_epsilon_by_round_ends_where_the_accountant_says():
    event = PoissonGaussian(sampling_prob=0.01, noise_multiplier=0.8)
    points = epsilon_points(record("a", [], events=[event] * 450))
    assert len(points) <= 201
    assert [points[0]["round"], points[-1]["round"]] == [1, 450]
    assert points[-1]["epsilon"] == pytest.approx(epsilons([(event, 450)], 1e-9)["rdp"])
    assert all(a["epsilon"] < b["epsilon"] for a, b in itertools.pairwise(points))


def test_rounds_done_again_cost_again():
    event = PoissonGaussian(sampling_prob=0.01, noise_multiplier=0.8)
    once = record("a", [], events=[event] * 4)
    again = replace(once, entries=[*once.entries, *once.entries[2:]])
    assert [p["round"] for p in epsilon_points(again)] == [1, 2, 3, 4]
    assert epsilon_points(again)[-1]["epsilon"] == pytest.approx(epsilons([(event, 6)], 1e-9)["rdp"])


def test_a_run_without_privacy_has_no_curve_of_epsilon():
    assert epsilon_points(record("a", [], events=[NonPrivate(reason="no noise is added")])) == []


def test_the_hypothetical_epsilon_of_the_papers_private_run():
    """Trained with 100 users a round at sigma = 0.003 and S = 15 (z = 0.02), accounted for 5,000 of 763,430 (z = 1)."""
    trained = PoissonGaussian(sampling_prob=100 / 763_430, noise_multiplier=0.003 / (15 / 100))
    found = hypothetical_epsilon(record("a", [], events=[trained] * 5000), 763_430, 5000)
    assert found is not None
    meant = PoissonGaussian(sampling_prob=5000 / 763_430, noise_multiplier=1.0)
    assert found.epsilon == pytest.approx(best_epsilon([(meant, 5000)], 763_430**-1.1).epsilon, rel=1e-6)
    assert found.words.startswith("Hypothetical")
    assert "did not happen" in found.words


def test_more_users_without_more_a_round_is_only_a_smaller_q():
    event = PoissonGaussian(sampling_prob=0.1, noise_multiplier=0.7)
    found = hypothetical_epsilon(record("a", [], events=[event] * 30, users_per_round=75, population=750), 1_000_000)
    assert found is not None
    meant = PoissonGaussian(sampling_prob=75 / 1_000_000, noise_multiplier=0.7)
    assert found.epsilon == best_epsilon([(meant, 30)], 1_000_000**-1.1).epsilon


def test_no_hypothetical_epsilon_for_a_run_without_privacy_or_an_impossible_draw():
    assert hypothetical_epsilon(record("a", [], events=[NonPrivate(reason="no noise is added")]), 10**6) is None
    private = record("a", [], events=[PoissonGaussian(sampling_prob=0.1, noise_multiplier=0.7)])
    with pytest.raises(InvalidValue, match="cannot be drawn"):
        hypothetical_epsilon(private, 10)


def test_a_fixed_noise_on_the_count_of_the_clipped_does_not_grow_with_the_users():
    """S follows the users, sigma_b = 5 is given: 1/z^2 = 1/z_delta^2 + 1/(2 sigma_b)^2, and only z_delta grows with them."""
    together = PoissonGaussian(sampling_prob=0.001, noise_multiplier=(1.0**-2 + 10.0**-2) ** -0.5)
    run = record("a", [], events=[together] * 30, users_per_round=100, population=100_000)
    fixed = replace(run, tables={"clip": {"kind": "adaptive", "count_noise_std": 5.0}})
    found = hypothetical_epsilon(fixed, 10**6, 5000)
    assert found is not None
    meant = PoissonGaussian(sampling_prob=0.005, noise_multiplier=(50.0**-2 + 10.0**-2) ** -0.5)
    assert found.epsilon == pytest.approx(best_epsilon([(meant, 30)], 1e6**-1.1).epsilon, rel=1e-9)
    by_users = hypothetical_epsilon(
        replace(run, tables={"clip": {"kind": "adaptive"}}), 10**6, 5000
    )  # sigma_b: a twentieth
    assert by_users is not None
    assert by_users.epsilon < found.epsilon
