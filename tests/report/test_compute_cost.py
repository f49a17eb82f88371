"""Rounds and user updates to reach the same accuracy, compared with hand computation and with the paper."""

import pytest

from tests.report.builders import made_up_record
from unheard.errors import InvalidValue
from unheard.privacy.events import NonPrivate, PoissonGaussian
from unheard.report.comparison import choose_baseline, compute_costs


def test_the_papers_sixty_times_computation():
    """Section 1: 17.5 % after 4,120 rounds of 100 users, and after 4,980 rounds of about 5,000."""
    baseline = made_up_record("baseline", [0.17] * (4120 // 20 - 5) + [0.175] * 5)
    private = made_up_record("private", [0.17] * (4980 // 20 - 5) + [0.175] * 10, users_per_round=5000)
    lines = {line.run: line for line in compute_costs([baseline, private], baseline)}
    assert [lines["baseline"].rounds, lines["private"].rounds] == [4120, 4980]
    assert [lines["baseline"].updates, lines["private"].updates] == [412_000, 24_900_000]
    assert lines["private"].times == pytest.approx(60.4, abs=0.05)
    assert lines["baseline"].times == 1


def test_a_run_that_never_reaches_the_target_says_so_with_its_best():
    good, bad = made_up_record("good", [0.2] * 5), made_up_record("bad", [0.1, 0.15, 0.1])
    lines = compute_costs([good, bad], good)
    assert [line.rounds for line in lines] == [20, None]
    assert lines[1].times is None
    assert lines[1].best == pytest.approx(0.125)


def test_the_baseline_is_the_one_asked_for_or_the_first_without_privacy():
    private = made_up_record("p", [0.1], events=[PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.0)])
    plain = made_up_record("q", [0.1], events=[NonPrivate(reason="no noise is added")])
    assert choose_baseline([private, plain]) is plain
    assert choose_baseline([private]) is private
    assert choose_baseline([private, plain], "runs/p") is private
    with pytest.raises(InvalidValue, match="p, q"):
        choose_baseline([private, plain], "r")
