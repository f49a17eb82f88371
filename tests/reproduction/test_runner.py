"""Running the recipes: all in their tiny form, stopped or killed runs continue, and results contain no text."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from reproduction.bootstrap import difference_interval, load
from reproduction.corpora import find_corpora
from reproduction.measures import record
from reproduction.recipe import CORPORA, FULL, SMOKE, distinct
from reproduction.recipes import RECIPES
from reproduction.results import FILE, append, read_runs
from reproduction.runner import GroupBegan, GroupEnded, RoundDone, Skipped, run_steps
from reproduction.scheduling import Step, Throughput, jobs_of, steps_by_rank
from reproduction.workspace import Workspace

from reproduction import runner
from unheard.corpus.store import write_store
from unheard.engines.choice import EngineChoice
from unheard.errors import InvalidValue, RunFolderError, RunFolderExists
from unheard.privacy import accountants, budget, statement
from unheard.privacy.ledger import NO_LEDGERS, RECORD, Ledger
from unheard.privacy.population_ledger import PopulationLedger
from unheard.training.checkpoint import checkpoint_files, load_model, read_checkpoint
from unheard.training.loop import train_together

SIX = replace(SMOKE, most_rounds=6, evaluate_every=2, checkpoint_every=2)
TWO_RUNS = Step(recipes=("estimators",), runs=("baseline", "variable-fixed*"))


def workplace(store, folder: Path, scale=SIX, roles=("main",), other: Path | None = None, **more) -> Workspace:
    paths = dict.fromkeys(roles, store.path) | ({} if other is None else {"other": other})
    corpora = find_corpora([f"{role}={path}" for role, path in paths.items()])
    return Workspace(corpora=corpora, work=folder / "work", results=folder / "results", scale=scale, **more)


def lines(place: Workspace) -> list[dict]:
    return [json.loads(line) for line in (place.results / FILE).read_text().splitlines()]


def model_of(place: Workspace, name: str, model) -> torch.Tensor:
    return load_model(place.folder(name).model, model)


def test_a_kill_on_a_cpu_costs_few_rounds(store, tmp_path):
    job = jobs_of(TWO_RUNS, FULL)[0]
    rounds = workplace(store, tmp_path, FULL, engine=EngineChoice(device="cpu")).run(job).training.checkpoint_every
    assert rounds < FULL.checkpoint_every
    assert workplace(store, tmp_path, SIX).run(jobs_of(TWO_RUNS, SIX)[0]).training.checkpoint_every == 2


@pytest.fixture(scope="module")
def everything(store, tmp_path_factory):
    """Run all recipes in their tiny form. All roles have the same small store, except `other`.

    The store of `other` has the same held-out users, and one training user less: a model that was trained on the main
    store is not public for its users. The population is a part of the id of a seeded run, so the ids differ too.
    """
    users = store.train
    others = write_store(
        tmp_path_factory.mktemp("other") / "counting",
        train=[users.tokens(k) for k in range(users.num_users - 1)],
        held_out=[store.held_out.tokens(k) for k in range(store.held_out.num_users)],
        vocabulary=store.vocabulary,
        info={key: store.info[key] for key in ("tokens", "vocabulary")},
    )
    place = workplace(store, tmp_path_factory.mktemp("all"), SMOKE, CORPORA, other=others.path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            accountants, "WIDEST_GRID", 0.0
        )  # epsilons by RDP alone: PLD takes a second for each of sixty runs
        # Parts of a statement that are not in the results: epsilon by delta, and epsilon for a replaced user.
        patched.setattr(statement, "_curve", lambda *_: [])
        patched.setattr(budget, "replace_one_epsilon", accountants.best_epsilon)
        return place, list(run_steps(place, steps_by_rank(["all"])))


def test_every_recipe_runs_and_every_run_once(everything):
    place, happened = everything
    assert not [one for one in happened if isinstance(one, Skipped)]
    made = [line["name"] for line in lines(place)]
    assert sorted(made) == sorted(run.name for run in distinct(RECIPES.values()))
    assert all(line["rounds"] == line["planned"] == 2 for line in lines(place))
    assert all([row["round"] for row in line["evaluations"]] == [1, 2] for line in lines(place))
    groups = [one.names for one in happened if isinstance(one, GroupBegan)]
    assert groups[0][:4] == ("baseline", "baseline-seed2", "baseline-seed3", "flat-S15-sigma0.003")
    assert len(groups) < len(made) / 2  # side by side


def test_finished_runs_are_not_repeated(everything):
    place, _ = everything
    before = lines(place)
    assert list(run_steps(place, steps_by_rank(["all"]))) == []
    assert lines(place) == before


def test_a_result_has_all_that_exhibits_need(everything):
    place, _ = everything
    results = read_runs(place.results)
    private, baseline = results["flat-S15-sigma0.003"], results["baseline"]
    assert set(private.head_words) == {"10", "50", "100"}
    assert len({sum(counts) for counts in private.head_words.values()}) == 1
    assert baseline.epsilon == {"moments": None, "rdp": None, "pld": None, "delta": pytest.approx(60**-1.1)}
    assert private.epsilon["rdp"] > 0
    assert (private.population, private.seed, results["baseline-seed3"].seed) == (60, 1, 3)
    assert private.parameters == place.run(_job("flat-S15-sigma0.003")).model.layout.total
    assert private.users_per_second > 0
    assert private.seconds > 0
    assert private.settings["noise"] == {"kind": "gaussian", "noise_std": 0.003}
    assert results["other-baseline"].accuracy_elsewhere["main"]["accuracy_top1"] >= 0
    assert baseline.accuracy_elsewhere == {}
    # both roles have the same held-out text, so both accuracies are equal
    here = results["other-baseline"].evaluations[-1]["accuracy_top1"]
    assert results["other-baseline"].accuracy_elsewhere["main"]["accuracy_top1"] == here


def test_hits_of_every_held_out_user_are_kept_for_the_bootstrap(everything, store):
    """The hits are of all held-out users, even if the evaluations of a run use fewer."""
    place, _ = everything
    for run in distinct(RECIPES.values()):
        counts = load(place.results / run.name)
        assert len(counts["targets"]) == store.held_out.num_users
        assert counts["targets"].sum() > counts["words"].sum() > 0
    low, high = difference_interval([place.results / "baseline"], [place.results / "flat-S15-sigma0.003"])
    assert low <= high


def test_nothing_of_text_or_places_is_in_the_results(everything, store):
    place, _ = everything
    text = (place.results / FILE).read_text()
    assert str(place.work) not in text
    assert str(store.path) not in text
    words = {token for line in lines(place) for token in json.dumps(line).replace('"', " ").split()}
    assert not {word for word in store.vocabulary.words if word in words}


def test_a_run_after_another_begins_from_its_last_model(everything):
    place, _ = everything
    for name, parent in (
        ("then-flat-S10-sigma0.006", "flat-S20-sigma0.012"),
        ("after-public-flat-S15-sigma0.003", "other-baseline"),
    ):
        run = place.run(_job(name))
        first = read_checkpoint(checkpoint_files(place.folder(name))[0])
        assert first.state.round == 0
        assert torch.equal(first.state.params_P, model_of(place, parent, run.model))
        assert read_runs(place.results)[name].settings["training"]["init_from"] == f"{parent} after 2 rounds"
    # A run that starts from a model includes its cost, unless that model was trained on other users.
    assert len(Ledger.read(place.folder("then-flat-S10-sigma0.006").ledger)) == 4
    assert len(Ledger.read(place.folder("after-public-flat-S15-sigma0.003").ledger)) == 2


def test_all_runs_begin_from_one_model_and_seeds_make_them_differ(everything):
    place, _ = everything
    names = ("baseline", "baseline-seed2", "flat-S15-sigma0.003")
    firsts = [read_checkpoint(checkpoint_files(place.folder(name))[0]).state for name in names]
    assert {state.round for state in firsts} == {0}
    assert all(torch.equal(state.params_P, firsts[0].params_P) for state in firsts)
    model = place.run(_job("baseline")).model
    assert not torch.equal(model_of(place, "baseline", model), model_of(place, "baseline-seed2", model))


def test_every_run_is_charged_to_a_ledger_in_the_work_folder(everything, store):
    place, _ = everything
    charged = PopulationLedger.read(place.work / "ledgers" / "flat-S15-sigma0.003.jsonl")
    assert len(charged.events) == 2
    assert not (store.path / "ledger.jsonl").exists() or not any(
        "paper" in str(run.facts) for run in PopulationLedger.read(store.path / "ledger.jsonl").runs.values()
    )


def _job(name: str):
    from reproduction.scheduling import jobs_of

    jobs = [job for step in steps_by_rank(["all"]) for job in jobs_of(step, SMOKE)]
    return next(job for job in jobs if job.run.name == name)


class Clock:
    """A clock that advances by one second at each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    place = workplace(store, tmp_path_factory.mktemp("whole"))
    list(run_steps(place, [TWO_RUNS]))
    return place


def model(place: Workspace, name: str) -> torch.Tensor:
    from reproduction.scheduling import jobs_of

    job = next(job for job in jobs_of(TWO_RUNS, SIX) if job.run.name == name)
    return model_of(place, name, place.run(job).model)


def test_a_command_that_is_out_of_time_says_how_far_it_got_and_continues_later(store, tmp_path, whole):
    place = workplace(store, tmp_path)
    happened = list(run_steps(place, [TWO_RUNS], stop_after=14, clock=Clock()))
    ended = next(one for one in happened if isinstance(one, GroupEnded))
    assert ended.stopped
    stopped = read_runs(place.results)["baseline"]
    assert 0 < stopped.rounds < stopped.planned == 6
    reported = [(one.name, one.round) for one in happened if isinstance(one, RoundDone)]
    names = ("baseline", "variable-fixed-denominator")
    assert reported == [(name, number) for number in range(1, stopped.rounds + 1) for name in names]  # whole turns
    list(run_steps(place, [TWO_RUNS]))
    assert read_runs(place.results)["baseline"].rounds == 6
    assert [line["rounds"] for line in lines(place) if line["name"] == "baseline"] == [stopped.rounds, 6]
    for name in ("baseline", "variable-fixed-denominator"):
        assert torch.equal(model(place, name), model(whole, name))
        assert read_runs(place.results)[name].evaluations == read_runs(whole.results)[name].evaluations
    assert read_runs(place.results)["baseline"].seconds > stopped.seconds


def test_a_caller_that_leaves_early_gets_a_record_of_finished_rounds(store, tmp_path):
    place = workplace(store, tmp_path)
    going = run_steps(place, [TWO_RUNS])
    for happening in going:
        if isinstance(happening, RoundDone) and happening.round == 3:
            break
    going.close()
    assert {line["name"]: line["rounds"] for line in lines(place)} == {
        "baseline": 3,
        "variable-fixed-denominator": 3,
    }


def test_a_group_that_is_left_before_its_first_round_leaves_no_line(store, tmp_path):
    place = workplace(store, tmp_path)
    going = run_steps(place, [TWO_RUNS])
    assert isinstance(next(going), GroupBegan)
    going.close()
    assert not (place.results / FILE).exists() or lines(place) == []


KILLED = """
import os, sys
from tests.reproduction.test_runner import TWO_RUNS, workplace
from unheard.corpus.store import TokenStore
from reproduction.runner import RoundDone, run_steps
from pathlib import Path
for happening in run_steps(workplace(TokenStore.open(sys.argv[1]), Path(sys.argv[2])), [TWO_RUNS]):
    if isinstance(happening, RoundDone) and happening.round == 5:
        os._exit(9)
"""


@pytest.mark.system
def test_the_same_call_continues_after_a_kill(store, tmp_path):
    ended = subprocess.run([sys.executable, "-c", KILLED, store.path, tmp_path], cwd=Path(__file__).parents[2])
    assert ended.returncode == 9
    place = workplace(store, tmp_path)
    assert not (place.results / FILE).exists()
    assert place.rounds_done("baseline") == 4
    list(run_steps(place, [TWO_RUNS]))
    assert [(line["name"], line["rounds"]) for line in lines(place)] == [
        ("baseline", 6),
        ("variable-fixed-denominator", 6),
    ]
    assert len(Ledger.read(place.folder("baseline").ledger)) == 7  # the lost round is charged twice
    assert [row["round"] for row in lines(place)[0]["evaluations"]] == [2, 4, 6]


def test_a_group_that_fails_does_not_end_the_others_and_continues_later(store, tmp_path, monkeypatch):
    place, step = (
        workplace(store, tmp_path),
        Step(recipes=("estimators", "unit-norm"), runs=("variable-f*", "free-norm*")),
    )

    def failing(runs, **more):
        for number, report in train_together(runs, **more):
            if report.round == 3 and "free-norm" not in str(runs[0][1]):
                raise RuntimeError("CUDA out of memory")
            yield number, report

    monkeypatch.setattr(runner, "train_together", failing)
    ended = [one for one in run_steps(place, [step]) if isinstance(one, GroupEnded)]
    assert ["out of memory" in (one.error or "") for one in ended] == [True, False]
    assert {name: one.rounds for name, one in read_runs(place.results).items()} == {
        "variable-fixed-denominator": 3,
        "free-norm-baseline": 6,
        "free-norm-flat-S15": 6,
    }
    monkeypatch.undo()
    list(run_steps(place, [step]))
    assert read_runs(place.results)["variable-fixed-denominator"].rounds == 6


def test_a_run_that_cannot_be_measured_does_not_keep_the_others_from_their_line(store, tmp_path, monkeypatch):
    def failing(job, *what, **more):
        if job.run.name == "baseline":
            raise RuntimeError("no room")
        return record(job, *what, **more)

    monkeypatch.setattr(runner, "record", failing)
    place = workplace(store, tmp_path)
    (ended,) = [one for one in run_steps(place, [TWO_RUNS]) if isinstance(one, GroupEnded)]
    assert "no room" in (ended.error or "")
    assert [line["name"] for line in lines(place)] == ["variable-fixed-denominator"]


def test_a_cap_is_enough_until_more_is_asked_for(store, tmp_path):
    place = workplace(store, tmp_path)
    list(run_steps(place, [TWO_RUNS], cap=2))
    assert list(run_steps(place, [TWO_RUNS], cap=2)) == []
    assert {line["rounds"] for line in lines(place)} == {2}
    list(run_steps(place, [replace(TWO_RUNS, rounds=4)]))
    assert {result.rounds for result in read_runs(place.results).values()} == {4}


def test_a_lost_work_folder_is_made_again_where_others_begin_from_it(store, tmp_path):
    place = workplace(store, tmp_path, SMOKE)
    first = Step(recipes=("trade-offs-adjusted",), runs=("flat-S20-sigma0.012",))
    list(run_steps(place, [first]))
    shutil.rmtree(place.work)
    # The store has a record of the ledgers of the experiments, which are deleted too.
    (store.path / RECORD).write_text(json.dumps(NO_LEDGERS))
    assert list(run_steps(place, [first])) == []
    list(run_steps(place, [Step(recipes=("trade-offs-adjusted",), runs=("then-flat-S10*",))]))
    assert [line["name"] for line in lines(place)] == [first.runs[0], first.runs[0], "then-flat-S10-sigma0.006"]


def test_a_run_that_began_from_an_earlier_state_of_another_is_named(store, tmp_path):
    """After a trial of three rounds and a full run of a thousand, a child would still start from the model after three."""
    place = workplace(store, tmp_path)
    step = Step(recipes=("trade-offs-adjusted",), runs=("flat-S20-sigma0.012", "then-flat-S10*"))
    list(run_steps(place, [step], cap=2))
    assert place.started_early(jobs_of(step, place.scale, 2)) == {}
    ((why, names),) = place.started_early(jobs_of(step, place.scale, 4)).items()
    assert names == ["then-flat-S10-sigma0.006"]
    assert why == "started from flat-S20-sigma0.012 after 2 of 4 rounds"
    shutil.rmtree(place.folder(names[0]).path)
    assert place.started_early(jobs_of(step, place.scale, 4)) == {}


def test_a_run_whose_parent_is_not_there_yet_waits(store, tmp_path):
    place = workplace(store, tmp_path, SIX)
    step = Step(recipes=("trade-offs-adjusted",), runs=("then-flat-S10*",), seconds=14)
    happened = list(run_steps(place, [step], clock=Clock()))
    assert [line["name"] for line in lines(place)] == ["flat-S20-sigma0.012"]
    assert not any(isinstance(one, GroupBegan) and "then-flat-S10-sigma0.006" in one.names for one in happened)


def test_runs_that_are_not_possible_here_are_skipped_with_a_reason(store, tmp_path):
    place = workplace(store, tmp_path, replace(SMOKE, users_divided_by=1))
    step = Step(recipes=("users-per-round",), runs=("baseline-C1000", "baseline-C10"))
    skipped = {one.name: one.why for one in run_steps(place, [step]) if isinstance(one, Skipped)}
    assert "1,000 users per round are more" in skipped["baseline-C1000"]
    assert [line["name"] for line in lines(place)] == ["baseline-C10"]
    public = Step(recipes=("public-start",), runs=("after-public*",))
    skipped = {
        one.name: one.why for one in run_steps(replace(place, scale=SMOKE), [public]) if isinstance(one, Skipped)
    }
    assert "no corpus 'other'" in skipped["other-baseline"]
    assert "starts from other-baseline" in skipped["after-public-flat-S15-sigma0.003"]


def test_results_and_folders_of_other_settings_are_not_mixed(store, tmp_path, whole):
    place = workplace(store, tmp_path, seed_shift=7)
    append(place.results, read_runs(whole.results).values())
    with pytest.raises(InvalidValue, match="another --name"):
        list(run_steps(place, [TWO_RUNS]))
    shutil.rmtree(place.results)
    shutil.copytree(whole.work, place.work)
    with pytest.raises(RunFolderExists, match="other settings"):
        list(run_steps(place, [TWO_RUNS]))


def test_results_and_folders_of_another_corpus_are_not_mixed(store, tmp_path, whole):
    place = workplace(store, tmp_path)
    append(place.results, read_runs(whole.results).values())
    assert list(run_steps(place, [TWO_RUNS])) == []
    other = replace(place, corpora={"main": replace(place.corpora["main"], digest="another")})
    with pytest.raises(InvalidValue, match="another corpus"):
        list(run_steps(other, [TWO_RUNS]))
    shutil.rmtree(place.results)
    shutil.copytree(whole.work, place.work)
    with pytest.raises(RunFolderExists, match="corpus"):
        list(run_steps(other, [TWO_RUNS]))
    assert not (place.results / FILE).exists()


def test_a_corpus_that_holds_nobody_out_is_skipped_with_advice(store, tmp_path):
    place = workplace(store, tmp_path)
    place = replace(place, corpora={"main": replace(place.corpora["main"], held_out=0)})
    skipped = list(run_steps(place, [TWO_RUNS]))
    assert all(isinstance(one, Skipped) and "--held-out" in one.why for one in skipped)
    assert len(skipped) == 2


@pytest.mark.parametrize(("longest", "batch_size"), [(1001, None), (1002, 200), (2001, 200), (2002, None)])
def test_fedsgd_takes_all_of_the_longest_users_data(store, tmp_path, longest, batch_size):
    place = workplace(store, tmp_path)
    corpus = replace(place.corpora["main"], longest=longest)
    run = replace(place, corpora={"main": corpus}).run(_job("fedsgd-flat-S20"))
    assert run.plan.update.batch_size == batch_size
    assert workplace(store, tmp_path).corpora["main"].longest == max(len(t) for t in users_of(store))


def users_of(store):
    return [store.train.tokens(k) for k in range(store.train.num_users)]


def test_a_line_that_a_kill_left_unfinished_is_written_anew(store, tmp_path, whole):
    place = workplace(store, tmp_path)
    shutil.copytree(whole.work, place.work)
    append(place.results, read_runs(whole.results).values())
    file = place.results / FILE
    before = file.read_bytes()
    file.write_bytes(before[:-100])
    assert list(read_runs(place.results)) == ["baseline"]
    list(run_steps(place, [TWO_RUNS]))
    assert file.read_bytes().count(b"\n") == 2
    assert read_runs(place.results)["variable-fixed-denominator"].evaluations == lines(whole)[1]["evaluations"]
    file.write_bytes(before[:-1])  # all of it but the end of the line
    append(place.results, [read_runs(whole.results)["baseline"]])
    assert len(lines(place)) == 3


@pytest.mark.parametrize("strange", [b"[]", b"3", b"{", b'"\xff"', b'{"name": "baseline"}'])
def test_a_line_that_is_no_result_is_named(tmp_path, whole, strange):
    append(tmp_path, read_runs(whole.results).values())
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(strange + b"\n\n" + content)
    with pytest.raises(InvalidValue, match="line 1, is not a result"):
        read_runs(tmp_path)


def test_a_results_folder_that_cannot_be_written_loses_nothing(store, tmp_path, whole):
    (tmp_path / "results").write_text("in the way")
    with pytest.raises(RunFolderError, match="--results"):
        append(tmp_path / "results", read_runs(whole.results).values())


def test_pending_work_of_the_first_turn_is_not_counted_in_the_second():
    now = [0.0]
    pace = Throughput(lambda: now[0])
    pace.begin()
    pace.count(0, 50)
    assert pace.is_first_turn
    now[0] = 7.0  # until then the device was busy with earlier work
    pace.settled()
    now[0] = 9.0
    pace.count(0, 50)
    assert not pace.is_first_turn
    assert pace.updates_per_second == 50 / 2


def test_the_pace_leaves_out_the_first_turn_and_keeps_time_for_the_end():
    now = [0.0]
    pace = Throughput(lambda: now[0])
    pace.begin()
    for moment, number in ((100, 0), (100, 1), (101, 0), (102, 1), (103, 1)):  # the first run ends before the second
        now[0] = moment
        pace.count(number, 50)
    assert pace.updates_per_second == 150 / 3
    now[0] = 113
    pace.closed(runs=2)
    assert not pace.is_over(until=None, runs=2)
    assert not pace.is_over(until=124, runs=2)
    assert pace.is_over(until=123, runs=2)
