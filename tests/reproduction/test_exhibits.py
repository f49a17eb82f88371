"""Every verdict, with invented results for which the paper's conclusion holds, does not hold, and cannot be decided."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from reproduction.exhibit import NOT_RUN
from reproduction.exhibits import EXHIBITS, exhibit
from reproduction.exhibits.clip_choices import FROM_START
from reproduction.exhibits.tables import judge_table_1 as judge_rounds
from reproduction.printed import TABLE_1, moments
from reproduction.recipes import RECIPES
from reproduction.results import ResultSet, read_results
from reproduction.verdict import Undecided, in_points

from tests.reproduction.builders import RUNS, changed, moved, world
from unheard.errors import UnknownKey
from unheard.formatting import percent

pytestmark = pytest.mark.usefixtures("quick")
NOT_BY_RUNS = {"table-rounds"}
BY_RUNS = [name for name in EXHIBITS if name not in NOT_BY_RUNS]

BROKEN = {
    # Changes of accuracy, in points by run, for which the paper's conclusion does not hold.
    "noised-vs-baseline": {f"flat-S15-sigma0.003{seed}": -1.0 for seed in ("", "-seed2", "-seed3")},
    "table-accuracy": {"flat-S15-sigma0.012": -3.0},
    "closing-the-gap": {"flat-S20-sigma0.003": -3.0, "flat-S30-sigma0.003": -3.0},
    "users-100-vs-1250": {"flat-S15-sigma0.012-C1250": 1.5},
    "private-for-real": {"flat-S15-sigma0.003-C5000": -1.5},
    "trade-offs": {"flat-S6.3-sigma0.00378": 2.0},
    "trade-offs-adjusted": {"then-flat-S20-sigma0.012": 3.0},
    "clipping": {"flat-S15": -2.0},
    "noise": {"flat-S20-sigma0.012": -3.0},
    "estimators": {"variable-fixed-denominator": -1.0},
    "users-per-round": {"baseline-C1000": 4.0},
    "fedsgd-clipping": {"fedsgd-flat-S2": -3.0},
    "fedsgd-noise": {"fedsgd-flat-S20-sigma0.002": -2.0},
    "dictionaries-clipping": {"30k-variable-true-average": 3.0},
    "dictionaries-noise": {"20k-flat-S20-sigma0.012": -2.0},
    "update-penalty": {"flat-S15-penalty0.01": 2.0},
    "tied-embeddings": {"untied-baseline": 3.0},
    "unit-norm": {"free-norm-flat-S15": 5.0},
    "another-corpus": {f"flat-S15-sigma0.003{seed}": -6.0 for seed in ("", "-seed2", "-seed3")},
    "public-start": {"after-public-flat-S15-sigma0.003": -5.0},
    "adaptive-clipping": {"adaptive-z0.06": -2.0},
    "other-models": {"gru-flat-S15-sigma0.003": -2.0},
}


def broken(name: str, results: ResultSet) -> ResultSet:
    if name == "head-words":  # the best model suggests many head words
        return changed(results, "baseline", head_words={head: [0] * 10 + [10_000] for head in ("10", "50", "100")})
    if name == "cost":
        return changed(results, "cost-C5000", seconds=10 * 3600.0)
    return moved(results, BROKEN[name])


def test_every_recipe_has_an_exhibit_and_no_exhibit_is_without_one():
    assert set(EXHIBITS) == set(RECIPES)
    assert set(BROKEN) | {"head-words", "cost"} | NOT_BY_RUNS == set(EXHIBITS)


@pytest.mark.parametrize("name", EXHIBITS)
def test_a_conclusion_holds_for_results_like_the_papers(name, everything):
    made = exhibit(name, everything)
    assert made.verdict.outcome == "held", made.verdict.sentence
    assert made.verdict.rule
    assert not made.notes or "Not run" not in " ".join(made.notes)


@pytest.mark.parametrize("name", BY_RUNS)
def test_a_conclusion_does_not_hold_for_contrary_results(name, everything):
    made = exhibit(name, broken(name, everything))
    assert made.verdict.outcome == "did not hold", made.verdict.sentence


@pytest.mark.parametrize("name", EXHIBITS)
def test_without_results_the_outcome_is_cannot_tell_and_every_cell_says_not_run(name):
    made = exhibit(name, ResultSet())
    if name in NOT_BY_RUNS:
        assert made.verdict.outcome == "held"
        return
    assert made.verdict.outcome == "cannot tell"
    assert made.verdict.sentence == "Not run."
    assert made.figures == ()
    assert all(row[1] == NOT_RUN for row in made.runs.rows)
    assert any(NOT_RUN in row for table in made.tables for row in table.rows) or name == "public-start"


@pytest.mark.parametrize("name", [name for name in BY_RUNS if name not in ("cost", "head-words")])
def test_after_a_few_rounds_it_is_too_early_to_tell(name):
    made = exhibit(name, world(rounds=40))
    assert made.verdict.outcome == "cannot tell"
    assert "too early" in made.verdict.sentence


@pytest.mark.parametrize("name", [name for name in BY_RUNS if name not in ("cost", "private-for-real", "head-words")])
def test_with_one_missing_run_the_outcome_is_cannot_tell_and_names_the_run(name, everything):
    gone = next(iter(BROKEN[name]))
    left = ResultSet(everything.corpus, {k: run for k, run in everything.runs.items() if k != gone})
    made = exhibit(name, left)
    assert made.verdict.outcome == "cannot tell"
    assert gone in made.verdict.sentence
    assert any(gone in note for note in made.notes)


@pytest.mark.parametrize("name", ["noised-vs-baseline", "clipping", "noise", "head-words", "trade-offs"])
def test_a_partial_run_says_after_how_many_rounds_and_where_it_stopped(name):
    made = exhibit(name, world(rounds=1000))
    assert name == "head-words" or "1,000 rounds" in made.verdict.sentence
    assert any("Stopped at 1,000 of" in note for note in made.notes)


def test_differences_within_the_spread_of_seeds_are_shown_and_decide_nothing(everything):
    close = moved(everything, {"then-flat-S20-sigma0.012": 0.75})  # the two end less than 0.2 points apart
    assert exhibit("trade-offs-adjusted", close).verdict.outcome == "cannot tell"
    apart = moved(everything, {"baseline-seed3": 4.0})  # seeds four points apart: nothing smaller counts
    made = exhibit("users-per-round", apart)
    assert "Two seeds of one run lie up to 4." in made.verdict.sentence
    assert made.verdict.outcome == "did not hold"  # 10 to 100 users is no longer more than chance


@pytest.mark.parametrize("name", ["noised-vs-baseline", "table-accuracy"])
def test_noise_that_costs_nothing_does_not_show_what_noise_costs(name, everything):
    """All runs have the same accuracy, except that σ = 0.012 is lower by less than two seeds of one run differ."""
    runs = {
        one: changed(
            everything,
            one,
            evaluations=[
                {**row, "accuracy_top1": 0.2 - 0.0001 * ("0.012" in one) + 0.001 * ("seed2" in one)}
                for row in run.evaluations
            ],
        ).runs[one]
        for one, run in everything.runs.items()
    }
    assert exhibit(name, ResultSet("x", runs)).verdict.outcome == "cannot tell"


def test_a_tiny_run_is_not_shown_as_one_with_all_its_users(everything):
    name = "flat-S15-sigma0.003-C5000"
    tiny = changed(everything, name, settings={"sampling": {"users_per_round": 3}})
    row = exhibit("private-for-real", tiny).tables[0].rows[1]
    assert row[1] == NOT_RUN
    assert set(row[2:]) == {"—"}
    shown = exhibit("private-for-real", tiny)
    assert not [line.name for line in shown.figures[0].lines if "5,000 users" in line.name]
    assert any("Tiny runs" in note for note in shown.notes)
    assert not any("Tiny runs" in note for note in exhibit("private-for-real", everything).notes)


@pytest.mark.parametrize("name", [*BROKEN, "head-words"])
def test_a_few_held_out_words_say_nothing(name, everything):
    short = everything
    for run in RUNS:
        counts = {head: [n // 10 for n in counts] for head, counts in everything.runs[run].head_words.items()}
        short = changed(short, run, head_words=counts)
    verdict = exhibit(name, short).verdict
    assert verdict.outcome == "cannot tell"
    assert "Hold out more users" in verdict.sentence


def test_models_of_one_quality_cannot_show_what_quality_does(everything):
    flat = dict(everything.runs)
    for name in flat:
        rows = [{**row, "accuracy_top1": 0.2} for row in flat[name].evaluations]
        flat[name] = changed(everything, name, evaluations=rows).runs[name]
    assert exhibit("head-words", ResultSet("x", flat)).verdict.outcome == "cannot tell"


def test_head_words_of_runs_of_very_different_length_are_not_compared(everything):
    """Head words decrease during training, so 1,250 users per round after 500 rounds cannot be compared with 100 after 5,000."""
    many = "flat-S15-sigma0.012-C1250"
    leaning = changed(everything, many, head_words={head: [0] * 10 + [10_000] for head in ("10", "50", "100")})
    assert exhibit("head-words", leaning).verdict.outcome == "did not hold"
    shorter = exhibit("head-words", changed(leaning, many, rounds=1000)).verdict
    assert "left open: one has 1,000 rounds, the other 5,000" in shorter.sentence
    assert shorter.outcome == "held"
    assert exhibit("head-words", changed(everything, "baseline", rounds=1000)).verdict.outcome == "cannot tell"


def test_a_run_made_in_two_sittings_is_smoothed_as_one_made_in_one(everything):
    """The first part ended at round 130, between two regular evaluations, with an evaluation at its end."""
    settings = everything.runs["baseline"].settings | {"evaluation": {"every": 20}}
    once = changed(everything, "baseline", settings=settings)
    evaluations = once.runs["baseline"].evaluations
    twice = changed(once, "baseline", evaluations=[*evaluations, {"round": 130, "accuracy_top1": 0.01}])
    assert twice.curve("baseline") == once.curve("baseline")
    assert len(once.curve("baseline")) == len(evaluations)
    still = changed(once, "baseline", rounds=130, evaluations=[*evaluations[:6], {"round": 130, "accuracy_top1": 0.01}])
    assert still.curve("baseline")[-1][0] == 130


def test_a_run_that_was_made_is_not_called_not_run(everything):
    """The cell of a stopped run says at which round; the cell of a run too short to be evaluated says so."""
    short = changed(everything, "flat-S15-sigma0.012", rounds=2, evaluations=[])
    made = exhibit("noised-vs-baseline", short)
    assert made.verdict.sentence == "Too few rounds to be evaluated: flat-S15-sigma0.012."
    (row,) = [row for row in made.tables[0].rows if row[0].startswith("σ = 0.012")]
    assert row[2] == "stopped at 2"
    stopped = changed(everything, "flat-S30-sigma0.003", rounds=1000)
    assert exhibit("closing-the-gap", stopped).tables[1].rows[2][3:] == ["stopped at 1,000"] * 4
    begun = changed(everything, "after-public-flat-S15-sigma0.003", rounds=200)
    cut = [row for row in begun.runs["after-public-flat-S15-sigma0.003"].evaluations if row["round"] <= 200]
    begun = changed(begun, "after-public-flat-S15-sigma0.003", evaluations=cut)
    assert exhibit("public-start", begun).tables[0].rows[-1][2] == "not within 200"
    late = changed(everything, "baseline", evaluations=everything.runs["baseline"].evaluations[-1:])
    late = changed(late, "other-baseline", rounds=100)
    assert exhibit("another-corpus", late).tables[0].rows[0][1] != "not run"


def test_runs_that_were_not_made_are_named_in_the_verdict(everything):
    without = ResultSet(everything.corpus, {n: run for n, run in everything.runs.items() if not n.endswith("-C5000")})
    assert "5,000 users per round were not run." in exhibit("private-for-real", without).verdict.sentence


def test_a_few_rounds_say_nothing_about_head_words_and_a_tiny_run_nothing_about_cost(everything):
    assert exhibit("head-words", world(rounds=40)).verdict.outcome == "cannot tell"
    tiny = changed(everything, "cost-C5000", settings={"sampling": {"users_per_round": 3}})
    assert exhibit("cost", tiny).verdict.outcome == "cannot tell"


def test_table_1_holds_only_if_every_cell_has_its_digits():
    cells = [(cell, moments(cell)) for row in TABLE_1 for cell in row]
    assert judge_rounds(cells, 10.0)[0] is True
    assert judge_rounds([(cells[0][0], 1.5), *cells[1:]], 10.0)[0] is False
    with pytest.raises(Undecided, match="Nothing was computed"):
        judge_rounds([], 10.0)


def test_the_privacy_of_runs_that_did_not_happen_is_called_hypothetical(everything):
    for name in ("table-rounds", "table-accuracy", "private-for-real"):
        made = exhibit(name, everything)
        assert "ypothetical" in " ".join(table.note for table in made.tables)


def test_table_2_prints_the_papers_epsilon_and_ours_side_by_side(everything):
    rows = exhibit("table-accuracy", everything).tables[0].rows
    assert [row[4:6] for row in rows] == [
        ["∞", "∞"],
        *([e, e] for e in ("4.634", "2.314", "2.038", "1.152", "0.991", "0.987")),
    ]


def test_epsilon_of_a_run_is_its_own_and_infinite_without_noise(everything):
    rows = {row[0]: row for row in exhibit("noised-vs-baseline", everything).runs.rows}
    assert rows["baseline"][7] == "∞"
    assert rows["flat-S15-sigma0.003"][7:9] == ["37.2", "3.1 × 10⁻⁵"]


def test_q_and_visits_stand_beside_every_run():
    """100 of 10,229 users for 3,000 rounds: 29 visits."""
    blogs = read_results(Path(__file__).parents[2] / "reproduction" / "results" / "blogs")
    runs = exhibit("noised-vs-baseline", blogs).runs
    shown = dict(zip(runs.columns, runs.rows[0], strict=True))
    assert (shown["q"], shown["visits"]) == ("0.0098", "29")


def test_figures_9_and_10_have_the_line_of_fedavg_and_11_and_12_are_sweeps(everything):
    for name in ("fedsgd-clipping", "fedsgd-noise"):
        lines = exhibit(name, everything).figures[0].lines
        assert any("FedAvg" in line.name and len(line.points) >= 3 for line in lines)
    for name, values in (("dictionaries-clipping", 5), ("dictionaries-noise", 5)):
        lines = exhibit(name, everything).figures[0].lines
        assert all(len(line.points) == values for line in lines if not line.is_level)


def test_table_2_labels_the_rounds_of_both_accuracies():
    blogs = read_results(Path(__file__).parents[2] / "reproduction" / "results" / "blogs")
    columns = exhibit("table-accuracy", blogs).tables[0].columns
    assert "AccT1 paper, round 5,000" in columns
    assert "AccT1 ours, round 1,500" in columns


@pytest.mark.parametrize("name", EXHIBITS)
def test_everything_shown_is_json(name, everything):
    content = json.loads(json.dumps(exhibit(name, everything).as_json(), allow_nan=False))
    assert content["recipe"]["name"] == name


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UnknownKey, match="Did you mean 'clipping'"):
        exhibit("cliping", ResultSet())


def test_an_estimate_far_below_the_result_is_no_good_estimate():
    better = moved(world(), {"flat-S15-sigma0.003-C5000": 1.5})
    assert exhibit("private-for-real", better).verdict.outcome == "did not hold"


def test_a_run_of_a_few_rounds_is_marked_and_decides_nothing():
    """The run with 5,000 users per round stopped after 40 rounds, far from its estimate; that with 1,250 is complete."""
    name = "flat-S15-sigma0.003-C5000"
    short = ResultSet("made-up", {**world().runs, name: world(rounds=40).runs[name]})
    verdict = exhibit("private-for-real", moved(short, {name: 3.0})).verdict
    assert verdict.outcome == "held"
    assert "5,000 users per round: after 40 rounds it is too early to tell" in verdict.sentence
    far = moved(short, {"flat-S15-sigma0.012-C1250": 3.0})
    assert exhibit("private-for-real", far).verdict.outcome == "did not hold"


def test_a_real_run_that_was_not_evaluated_where_its_estimate_stopped_is_no_match():
    real, estimate = "flat-S15-sigma0.012-C1250", "flat-S15-sigma0.012"
    results = ResultSet(
        "made-up", {**world(without=["flat-S15-sigma0.003-C5000"]).runs, estimate: world(rounds=600).runs[estimate]}
    )
    late = changed(results, real, evaluations=[row for row in results.runs[real].evaluations if row["round"] > 600])
    assert exhibit("private-for-real", results).verdict.outcome == "held"
    assert exhibit("private-for-real", late).verdict.outcome == "cannot tell"


def test_the_main_comparison_is_over_the_same_rounds_of_all_seeds():
    """Two better seeds of the baseline stopped slightly earlier, and count nevertheless."""
    better = moved(world(), {"baseline-seed2": 0.6, "baseline-seed3": 0.6})
    assert exhibit("noised-vs-baseline", better).verdict.outcome == "did not hold"
    for one in ("baseline-seed2", "baseline-seed3"):
        early = [row for row in better.runs[one].evaluations if row["round"] <= 4900]
        better = changed(better, one, rounds=4900, evaluations=early)
    verdict = exhibit("noised-vs-baseline", better).verdict
    assert verdict.outcome == "did not hold"
    assert verdict.sentence.startswith("After 4,900 rounds")


def test_the_main_comparison_uses_the_last_common_round_although_the_noisiest_run_stopped_earlier():
    loud = "flat-S15-sigma0.012"
    results = ResultSet("made-up", {**world().runs, loud: world(rounds=1000).runs[loud]})
    verdict = exhibit("noised-vs-baseline", results).verdict
    assert verdict.outcome == "held"
    assert verdict.sentence.startswith("After 5,000 rounds σ = 0.003")
    assert "it after 1,000 rounds." in verdict.sentence
    late = [
        {**row, "accuracy_top1": row["accuracy_top1"] - 0.02 * (row["round"] > 2000)}
        for row in results.runs["flat-S15-sigma0.003"].evaluations
    ]
    for seed in ("", "-seed2", "-seed3"):
        results = changed(results, f"flat-S15-sigma0.003{seed}", evaluations=late)
    assert (
        exhibit("noised-vs-baseline", results).verdict.outcome == "did not hold"
    )  # what came after 1,000 rounds counts


def test_rounds_that_one_clip_did_not_reach_decide_nothing():
    """S = 20 stopped after 500 rounds, so its loss after 3,000 rounds is unknown."""
    results = ResultSet("made-up", {**world().runs, "flat-S20": world(rounds=500).runs["flat-S20"]})
    assert "3,000" not in exhibit("clipping", results).verdict.sentence
    assert "3,000" in exhibit("clipping", world()).verdict.sentence


def test_a_difference_of_chance_says_nothing_about_norms():
    runs = world()
    gap = runs.accuracy("flat-S15", 3000) - runs.accuracy("free-norm-flat-S15", 3000)
    equal = moved(runs, {"free-norm-flat-S15": 100 * gap - 0.01})
    assert exhibit("unit-norm", equal).verdict.outcome == "cannot tell"


def test_a_model_that_diverges_without_a_clip_is_compared_with_its_clip_alone():
    runs = moved(world(), {"gru-baseline": -15.0})
    row = exhibit("other-models", runs).tables[0].rows[1]
    assert row[0] == "GRU"
    assert -1.0 < float(row[-1].replace("−", "-")) < 0.1
    worse = moved(runs, {"gru-flat-S15-sigma0.003": -2.0})
    assert exhibit("other-models", worse).verdict.outcome == "did not hold"


def level(results: ResultSet, names, accuracy: float) -> ResultSet:
    """Return the results with a constant accuracy of some runs."""
    runs = dict(results.runs)
    for name in names:
        rows = [{**row, "accuracy_top1": accuracy} for row in runs[name].evaluations]
        runs[name] = changed(results, name, evaluations=rows).runs[name]
    return ResultSet(results.corpus, runs)


@pytest.mark.parametrize("name", [name for name in BY_RUNS if name != "cost"])
def test_without_learning_the_outcome_is_cannot_tell(name, everything):
    """Without learning all differences are 0, which would satisfy every upper limit."""
    assert exhibit(name, level(everything, everything.runs, 0.0001)).verdict.outcome == "cannot tell"


@pytest.mark.parametrize(
    ("name", "gone_astray"),
    [
        ("other-models", "gru-flat-S15"),
        ("unit-norm", "free-norm-flat-S15"),
        ("tied-embeddings", "untied-baseline"),
        ("clipping", "variable-true-average"),
        ("closing-the-gap", "baseline"),
        ("noise", "flat-S20"),
        ("adaptive-clipping", None),
        ("dictionaries-noise", "30k-flat-S20"),
        ("public-start", "flat-S15-sigma0.003"),
        ("update-penalty", "flat-S15"),
    ],
)
def test_a_run_that_went_astray_is_no_measure_for_others(name, gone_astray, everything):
    """Compared with a baseline that has not learned, noise costs nothing. This says nothing about noise."""
    made = exhibit(name, level(everything, [gone_astray] if gone_astray else FROM_START.values(), 0.03))
    assert made.verdict.outcome == "cannot tell"
    assert "learned" in made.verdict.sentence
    assert (gone_astray or "flat-S") in made.verdict.sentence


def test_a_change_that_came_earlier_than_the_papers_is_named_in_the_verdict(everything):
    start = {"training": {"init_from": "flat-S20-sigma0.012 after 1500 rounds"}}
    made = exhibit("trade-offs-adjusted", changed(everything, "then-flat-S6.3-sigma0.00378", settings=start))
    assert "came after 1,500 (in the paper 6,000 and 4,885)" in made.verdict.sentence


def test_runs_begun_from_different_models_are_not_compared(everything):
    start = {"training": {"init_from": "flat-S20-sigma0.012 after 500 rounds"}}
    made = exhibit("trade-offs-adjusted", changed(everything, "then-flat-S20-sigma0.012", settings=start))
    assert made.verdict.outcome == "cannot tell"
    assert "different models" in made.verdict.sentence


def test_both_ends_of_the_papers_range_and_the_effect_of_chance_are_stated(everything):
    sentence = exhibit("trade-offs", everything).verdict.sentence
    assert all(words in sentence for words in ("S = 10 has", "S = 12.6 has", "Two seeds of one run"))


def test_the_papers_range_of_clips_does_not_hold_if_one_end_of_it_is_far_behind(everything):
    assert exhibit("trade-offs", moved(everything, {"flat-S10-sigma0.006": -1.0})).verdict.outcome == "did not hold"


def test_an_adaptive_clip_is_compared_with_the_best_of_the_whole_sweep(everything):
    made = exhibit("adaptive-clipping", moved(everything, {"flat-S20-sigma0.012": 3.0}))
    assert made.verdict.outcome == "did not hold"
    assert "S = 20" in made.verdict.sentence


def test_a_clip_is_judged_where_its_runs_got_to_though_others_stopped_before(everything):
    """Most runs of the sweep ended after 300 rounds, which are too few; S = 10 has lost two points after 3,000."""
    short = world(rounds=300).runs
    judged = {"variable-true-average", "flat-S10", "flat-S15", "flat-S20"}
    runs = {name: run if name in judged else short[name] for name, run in everything.runs.items()}
    rows = [
        {**row, "accuracy_top1": row["accuracy_top1"] - 0.02 * (row["round"] > 1000)}
        for row in runs["flat-S10"].evaluations
    ]
    made = exhibit("clipping", changed(ResultSet("made-up", runs), "flat-S10", evaluations=rows))
    assert made.verdict.outcome == "did not hold"
    assert "3,000 rounds" in made.verdict.sentence


def test_fedavg_that_stopped_early_decides_nothing(everything):
    """FedSGD has 3,000 rounds; FedAvg stopped after 500 of 1,500 rounds."""
    ahead = level(everything, ["fedsgd-flat-S2"], 0.21)
    stopped = ResultSet("made-up", {**ahead.runs, "flat-S20": world(rounds=500).runs["flat-S20"]})
    assert exhibit("fedsgd-clipping", stopped).verdict.outcome == "cannot tell"
    slow = level(ahead, ["flat-S20"], 0.10)
    assert exhibit("fedsgd-clipping", slow).verdict.outcome == "did not hold"


@pytest.mark.parametrize(
    ("name", "swings"),
    [("fedsgd-clipping", "fedsgd-flat-S2"), ("fedsgd-noise", "fedsgd-flat-S20-sigma0.002")],
)
def test_half_a_point_cannot_be_seen_between_runs_that_swing_by_six(name, swings, everything):
    """The accuracies vary by six points between evaluations, and their mean does not change."""
    rows = everything.runs[swings].evaluations
    rows = [{**row, "accuracy_top1": row["accuracy_top1"] + 0.03 * (-1) ** i} for i, row in enumerate(rows)]
    assert exhibit(name, everything).verdict.outcome == "held"
    made = exhibit(name, changed(everything, swings, evaluations=rows))
    assert made.verdict.outcome == "cannot tell"
    assert "uncertain by" in made.verdict.sentence


def test_runs_that_vary_together_can_be_distinguished(everything):
    """Runs with the same seed draw the same users, so their accuracies vary together."""
    names = [name for name in everything.runs if name.startswith("fedsgd-flat")]
    results = everything
    for name in names:
        rows = everything.runs[name].evaluations
        rows = [{**row, "accuracy_top1": row["accuracy_top1"] + 0.03 * (-1) ** i} for i, row in enumerate(rows)]
        results = changed(results, name, evaluations=rows)
    for name in ("fedsgd-clipping", "fedsgd-noise"):
        assert exhibit(name, results).verdict.outcome == exhibit(name, everything).verdict.outcome == "held"


@pytest.mark.parametrize(
    ("most", "one", "shown"),
    [
        (1500, 1500, "1,500"),
        (1500, 1000, "1,000"),
        (1500, 500, "1,500"),
        (1500, 400, "1,500"),
        (3000, 1000, "3,000"),
        (500, 400, None),
    ],
)
def test_a_sweep_is_drawn_where_all_of_it_got_to(most, one, shown):
    runs = {
        **world(rounds=most).runs,
        "fedsgd-flat-S20-sigma0.001": world(rounds=one).runs["fedsgd-flat-S20-sigma0.001"],
    }
    columns = exhibit("fedsgd-noise", ResultSet("made-up", runs)).tables[0].columns
    assert columns == ["", "100", "500", *([shown] if shown else [])]


def test_runs_never_evaluated_at_the_same_rounds_are_not_compared(everything):
    for name, run in (("fedsgd-clipping", "fedsgd-flat-S2"), ("fedsgd-noise", "fedsgd-flat-S20-sigma0.002")):
        *before, last = everything.runs[run].evaluations
        rows = [{**row, "round": row["round"] - 10} for row in before]
        # No common seed, and one common seed.
        for shifted in ([*rows, {**last, "round": last["round"] - 10}], [*rows, last]):
            made = exhibit(name, changed(everything, run, evaluations=shifted)).verdict
            assert made.outcome == "cannot tell"
            assert "fewer than two evaluations at the same rounds" in made.sentence


def test_one_seed_of_fedsgd_decides_no_difference_within_the_spread_of_seeds(everything):
    """A difference of 0.4 points at every evaluation is certain for these two runs, but not for FedSGD in general."""
    quiet = everything.runs["fedsgd-flat-S20"].evaluations
    for cost, outcome in ((0.25, "held"), (0.40, "cannot tell"), (0.60, "cannot tell"), (0.75, "did not hold")):
        rows = [{**row, "accuracy_top1": row["accuracy_top1"] - cost / 100} for row in quiet]
        made = exhibit("fedsgd-noise", changed(everything, "fedsgd-flat-S20-sigma0.002", evaluations=rows)).verdict
        assert (made.outcome, "uncertain by 0.20" in made.sentence) == (outcome, True)


def test_where_single_runs_are_compared_a_curve_is_of_one_seed(everything):
    made = exhibit("users-per-round", everything)
    assert not any(line.is_thin for line in made.figures[0].lines)
    ends = {line.name: line.points[-1][1] for line in made.figures[0].lines}
    assert {row[0]: row[-1] for row in made.tables[0].rows} == {name: percent(value) for name, value in ends.items()}
    told = "Of a run with several seeds, only the first is shown here."
    assert told in made.notes
    for name in ("noised-vs-baseline", "closing-the-gap"):
        assert any(line.is_thin for line in exhibit(name, everything).figures[0].lines)


@pytest.mark.parametrize("name", BY_RUNS)
def test_exhibits_of_the_first_seed_say_so(name, everything):
    """An exhibit without this note shows all seeds, if there are several."""
    told = "Of a run with several seeds, only the first is shown here."
    others = {run: 0.5 for run in everything.runs if "-seed" in run}
    before, after = exhibit(name, everything), exhibit(name, moved(everything, others))
    is_same = (before.tables, before.figures) == (after.tables, after.figures)
    has_seeds = any(len(everything.seeds(run.name)) > 1 for run in before.recipe.runs)
    assert (told in before.notes) == (told in after.notes)
    assert is_same == (told in before.notes or not has_seeds)


def test_a_run_that_others_begin_from_does_not_press_its_figure_into_a_corner():
    runs = {**world(rounds=1000).runs, "flat-S20-sigma0.012": world().runs["flat-S20-sigma0.012"]}
    lines = {line.name: line for line in exhibit("trade-offs", ResultSet("made-up", runs)).figures[0].lines}
    assert max(line.points[-1][0] for line in lines.values()) == 1000
    first, again = lines["S = 20, σ = 0.012"], lines["S = 20, σ = 0.012, again"]
    assert again.is_dashed > first.is_dashed
    assert again.tint == (first.tint or first.name)


def test_each_run_that_was_only_estimated_has_its_own_figure(everything):
    name = "flat-S15-sigma0.003-C5000"
    short = ResultSet("made-up", {**everything.runs, name: world(rounds=100).runs[name]})
    figures = {figure.name: figure for figure in exhibit("private-for-real", short).figures}
    assert {key: max(line.points[-1][0] for line in figure.lines) for key, figure in figures.items()} == {
        "private-for-real-1250": 3000,
        "private-for-real-5000": 100,
    }
    tiny = changed(everything, name, settings={"sampling": {"users_per_round": 3}})
    assert [figure.name for figure in exhibit("private-for-real", tiny).figures] == ["private-for-real-1250"]


def test_tiny_runs_are_as_long_as_they_were_meant_to_be(everything):
    tiny = world(rounds=2)
    runs = {
        name: replace(run, planned=2, settings={"sampling": {"users_per_round": 1}}) for name, run in tiny.runs.items()
    }
    made = exhibit("clipping", ResultSet("made-up", runs))
    assert not any("Stopped" in note for note in made.notes)
    assert {row[2] for row in made.runs.rows} == {"2"}
    assert any("Stopped at 2 of 3,000 rounds" in note for note in exhibit("clipping", tiny).notes)


def test_an_s_that_swings_might_be_the_best_where_2_was_seen_to_be(everything):
    fedsgd = [name for name in everything.runs if name.startswith("fedsgd-flat") and "sigma" not in name]
    even = level(everything, fedsgd, 0.15)
    assert exhibit("fedsgd-clipping", even).verdict.outcome == "held"
    rows = even.runs["fedsgd-flat-S1"].evaluations
    rows = [{**row, "accuracy_top1": 0.149 + 0.03 * (-1) ** i} for i, row in enumerate(rows)]
    made = exhibit("fedsgd-clipping", changed(even, "fedsgd-flat-S1", evaluations=rows))
    assert made.verdict.outcome == "cannot tell"


def test_models_after_different_numbers_of_rounds_are_not_compared(everything):
    """The model of the other corpus was evaluated at its end, so the others must be read at the same round."""
    short = world(rounds=600).runs
    runs = {
        name: short[name] if "baseline" in name or "S15-sigma0.003" in name else r
        for name, r in everything.runs.items()
    }
    runs["other-baseline"] = everything.runs["other-baseline"]
    made = exhibit("another-corpus", ResultSet("made-up", runs))
    assert made.verdict.outcome == "cannot tell"
    assert "1,500 rounds" in made.verdict.sentence
    assert any("1,500 rounds" in row[0] for row in made.tables[0].rows)


def test_changed_head_words_contradict_the_papers_conclusion(everything):
    """The accuracy is unchanged; only the suggestions of the run with 1,250 users per round differ."""
    name = "flat-S15-sigma0.012-C1250"
    counts = everything.runs[name].head_words["100"]
    moved = {**everything.runs[name].head_words, "100": [*counts[1:], counts[0]]}
    assert exhibit("head-words", everything).verdict.outcome == "held"
    assert exhibit("head-words", changed(everything, name, head_words=moved)).verdict.outcome == "did not hold"


def test_head_words_of_a_baseline_that_was_hardly_trained_decide_nothing(everything):
    short = world(rounds=40).runs["baseline"]
    assert (
        exhibit("head-words", ResultSet("made-up", {**everything.runs, "baseline": short})).verdict.outcome
        == "cannot tell"
    )


def test_a_figure_ends_where_only_one_run_continues(everything):
    """The run with 100 users per round is longer, because another exhibit needs it."""
    short = world(rounds=600).runs
    runs = {name: run if name == "baseline" else short[name] for name, run in everything.runs.items()}
    curves = exhibit("users-per-round", ResultSet("made-up", runs)).figures[0].lines
    assert max(round_ for line in curves for round_, _ in line.points) == 600
    alone = ResultSet("made-up", {"baseline": everything.runs["baseline"]})
    assert exhibit("users-per-round", alone).figures[0].lines[0].points[-1][0] == everything.runs["baseline"].rounds


@pytest.mark.parametrize(
    ("difference", "plain", "signed"),
    [(0.00134, "0.13", "+0.13"), (-0.0002, "−0.02", "−0.02"), (-0.00001, "0.00", "0.00"), (None, "—", "—")],
)
def test_a_difference_in_points_has_a_true_minus_and_zero_no_sign(difference, plain, signed):
    assert (in_points(difference), in_points(difference, signed=True)) == (plain, signed)
