"""The run file that `unheard init` writes: valid, with the noise that meets a target at the written delta."""

from dataclasses import replace

import pytest

from unheard.errors import InvalidValue
from unheard.mechanism.noise import GaussianNoise
from unheard.privacy import noise_choice
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import PoissonGaussian
from unheard.privacy.noise_choice import NoiseOption
from unheard.training import new_run_file
from unheard.training.run import read_run_file

RUN = {"corpus": "corpora/none", "population": 5000, "users_per_round": 50, "rounds": 40}


@pytest.fixture
def new_file(tmp_path):
    """Compose a run file, and read it as `unheard train` does."""

    def compose(**options):
        path = tmp_path / "run.toml"
        options = {**RUN, **options}
        new = new_run_file.new_run_file(path, **{**options, "corpus": tmp_path / options["corpus"]})
        path.write_text(new.text)
        return new, read_run_file(path)[0]

    return compose


def test_without_a_target_z_is_one(new_file):
    new, run = new_file()
    assert run.plan.noise.noise_multiplier == 1.0
    assert new.sentences == ()
    assert new.noise.noise_std == pytest.approx(15 / 50)
    assert not new.has_store


def test_comments_of_a_table_begin_at_one_column_whatever_the_values_are(new_file):
    long = "corpora/" + "november/" * 12
    for options in (
        {},
        {"population": 10**12, "users_per_round": 1234567.25},
        {"corpus": 'a\t# b "c"'},
        {"corpus": long},
    ):
        new, run = new_file(**options)
        assert str(run.corpus).endswith(str(options.get("corpus", "none")).rstrip("/"))
        for table in new.text.split("\n\n")[2:]:
            columns = {line.rindex("  # ") for line in table.split("\n") if "  # " in line}
            assert len(columns) <= 1, table
    assert "[corpus]\n# made by `unheard prepare`\npath = " in new.text


def test_the_written_delta_is_the_default_of_the_population_in_four_digits(new_file):
    for population in (20, 137, 9_999, 763_430, 10**9):
        _, run = new_file(population=population, users_per_round=10)
        assert run.claimed_delta == pytest.approx(population**-1.1, rel=5e-4)


@pytest.mark.system  # recomputes many plans
def test_a_target_is_met_by_the_least_noise(new_file):
    new, run = new_file(epsilon=4.0)
    event = run.plan.at(0, run.model.layout).event(0)
    assert 3.9 < best_epsilon([(event, 40)], run.claimed_delta).epsilon <= 4
    assert new.sentences[0].startswith(f"z = {run.plan.noise.noise_multiplier:g} meets epsilon 4 at delta ")


@pytest.mark.system
def test_a_comparison_of_kinds_of_noise_chooses_correlated_noise(new_file, monkeypatch):
    deltas = []

    def compare_quickly(**options):
        deltas.append(options["delta"])
        return noise_choice.compare_noise(**options, accountant="rdp", most_bands=4)

    monkeypatch.setattr(new_run_file, "compare_noise", compare_quickly)
    new, run = new_file(epsilon=4.0, compares_noise=True)
    assert deltas == [run.claimed_delta]  # the noise meets the target at the rounded delta of the file
    assert run.plan.at(0, run.model.layout).event(39).index == 39
    assert run.plan.correlated_facts()["rounds"] == 40
    events = [run.plan.at(0, run.model.layout).event(i) for i in range(40)]
    assert 3 < best_epsilon(events, run.claimed_delta).epsilon <= 4
    assert "less error than independent noise" in new.sentences[0]
    assert new.noise is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compares_noise": True}, "together with --epsilon"),
        ({"users_per_round": 0}, "must be above 0"),
        ({"users_per_round": 5001}, "more than the declared population of 5000"),
        ({"base": "nowhere"}, "no config.json"),
        ({"corpus": "posts.jsonl"}, r"is a file.*unheard prepare .*posts\.jsonl --user-field"),
    ],
)
def test_impossible_values_of_a_new_run_are_refused(new_file, tmp_path, options, message):
    (tmp_path / "posts.jsonl").write_text("{}")
    options = {**options, "base": tmp_path / options["base"]} if "base" in options else options
    with pytest.raises(InvalidValue, match=message):
        new_file(**options)


def test_where_independent_noise_is_best_the_run_file_has_its_z(new_file, monkeypatch):
    event = (PoissonGaussian(sampling_prob=0.01, noise_multiplier=1.2345), 40)
    own = {"noise_multiplier": 1.2345, "events": event, "epsilon": 4.0, "accountant": "rdp"}
    independent = NoiseOption(kind="independent", sampling="poisson", rms_error=1.0, **own)
    blt = replace(independent, kind="blt", noise_multiplier=0.5, rms_error=2.0)
    monkeypatch.setattr(new_run_file, "compare_noise", lambda **_: [independent, blt])
    new, run = new_file(epsilon=4.0, compares_noise=True)
    assert new.sentences[0] == "Independent noise is best here: z = 1.2345 meets epsilon 4."
    assert run.plan.noise == GaussianNoise(noise_multiplier=1.2345)
