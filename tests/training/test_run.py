"""Run files: tables correspond to the parts of a run one to one, and the message of an error names the wrong key."""

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from tests.conftest import CLIP_NORM

import unheard
from unheard.errors import InvalidValue, UnheardError, UnknownKey
from unheard.privacy.budget import Budget, default_delta
from unheard.training.run import (
    read_run_file,
    read_saved_run,
    run_from_tables,
    run_hash,
    run_toml,
    tables_from_run,
)


@pytest.fixture
def tables(run: unheard.Run) -> dict:
    return tables_from_run(run)


def test_a_run_goes_to_toml_and_back_unchanged(run):
    again, engine = run_from_tables(tomllib.loads(run_toml(run)))
    assert again.plan == run.plan
    assert again.model == run.model
    assert again.training == run.training
    assert again.claimed_delta == run.claimed_delta
    assert engine == unheard.EngineChoice()
    assert run_hash(again) == run_hash(run)


def test_every_part_survives_the_round_trip(run, store):
    from dataclasses import replace

    for changes in (
        {"clip": unheard.PerLayerClip(norm=2.0)},
        {"clip": unheard.PerLayerClip(norms=dict.fromkeys(run.model.layout.names, 1.0))},
        {"estimator": unheard.ClippedDenominator(min_total_weight=30.0)},
        {"weights": unheard.CappedWeights(weight_cap=100.0, total_weight=50.0)},
        {"update": unheard.FedSGD(batch_size=3)},
        {"update": unheard.FedSGD()},
        {
            "noise": unheard.NoNoise(),
            "clip": unheard.NoClip(),
            "sampling": unheard.FixedSizeSampling(users_per_round=5),
        },
        {"schedule": (unheard.Change(from_round=3, clip_norm=1.0), unheard.Change(from_round=5, noise_std=0.1))},
    ):
        changed = replace(run, plan=replace(run.plan, **changes))
        again, _ = run_from_tables(tomllib.loads(run_toml(changed)))
        assert again.plan == changed.plan
        assert run_hash(again) == run_hash(changed) != run_hash(run)


def test_what_may_change_on_resumption_does_not_change_the_hash(run):
    from dataclasses import replace

    longer = replace(run, training=replace(run.training, rounds=999, checkpoint_every=3), corpus=Path("elsewhere"))
    assert run_hash(longer) == run_hash(run)
    assert run_hash(replace(run, training=replace(run.training, init_seed=5))) != run_hash(run)


def test_a_run_from_before_there_was_a_key_continues_as_what_was_done_then():
    """The hash is that of a version in which [model] had no key keep_norm."""
    tables = tomllib.loads("""
        corpus = { path = "store" }
        privacy = { population = 1000 }
        model = { kind = "tied_lstm", vocabulary_size = 50 }
        sampling = { kind = "poisson", users_per_round = 10 }
        update = { kind = "fedavg", learning_rate = 6.0 }
        clip = { kind = "flat", norm = 15.0 }
        noise = { kind = "gaussian", noise_multiplier = 1.0 }
        training = { rounds = 5 }
    """)
    then = "8cbc81b19aa6a7f0f1b5276d7274fceb7f29306792664f80585229dc8b421b16"
    for keep_norm in (True, False):
        tables["model"]["keep_norm"] = keep_norm
        assert (run_hash(run_from_tables(tables)[0]) == then) is keep_norm


def test_a_run_folder_from_before_there_was_a_key_reads_as_what_was_done_then(tmp_path, tables):
    """A missing key has the current default in a user's run file, and the behaviour of the old version in a run folder."""
    for kind in ("tied_lstm", "tied_gru"):
        tables["model"] = {"kind": kind, "vocabulary_size": tables["model"]["vocabulary_size"]}
        path = tmp_path / "run.toml"
        path.write_text(tomli_w.dumps(tables))
        assert read_run_file(path)[0].model.keep_norm is False
        assert read_saved_run(path)[0].model.keep_norm is True
    path.write_text("model = 3")
    with pytest.raises(UnheardError):
        read_saved_run(path)


def test_leaving_out_what_has_a_default_is_the_same_run(tables, run):
    for name in ("weights", "estimator", "server", "engine"):
        del tables[name]
    assert run_hash(run_from_tables(tables)[0]) == run_hash(run)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda t: t["clip"].update(norn=3), UnknownKey, "'norn' in \\[clip\\].*Did you mean 'norm'"),
        (lambda t: t.update(nosie={}), UnknownKey, "\\[nosie\\].*Did you mean 'noise'"),
        (lambda t: t["clip"].update(kind="flatt"), UnknownKey, "Did you mean 'flat'"),
        (lambda t: t["clip"].update(norm="wide"), InvalidValue, "clip.norm must be a number, not 'wide'"),
        (lambda t: t["training"].update(rounds=2.5), InvalidValue, "training.rounds must be a whole number"),
        (lambda t: t["training"].update(rounds=True), InvalidValue, "whole number"),
        (lambda t: t["model"].update(tied=1), InvalidValue, "true or false"),
        (lambda t: t["clip"].update(norm=-1), InvalidValue, "norm must be above 0"),
        (lambda t: t.pop("clip"), InvalidValue, "lacks \\[clip\\]"),
        (lambda t: t["clip"].pop("norm"), InvalidValue, "lacks 'norm'"),
        (lambda t: t["clip"].pop("kind"), InvalidValue, "lacks 'kind'"),
        (lambda t: t.update(clip=3), InvalidValue, "must be a table"),
        (lambda t: t.update(training=3), InvalidValue, r"\[training\] must be a table"),
        (lambda t: t.update(schedule={"from_round": 2}), InvalidValue, "two pairs of brackets"),
        (lambda t: t.update(engine={"kind": "vectorized"}), InvalidValue, "Unknown engine.*'vectorised'"),
        (lambda t: t["privacy"].update(delta=0.5), InvalidValue, "below 1 / population"),
        (lambda t: t["privacy"].update(budget_epsilon=1.0, budget_accountant="pdl"), UnheardError, "pdl"),
        (
            lambda t: t.update(sampling={"kind": "fixed_size", "users_per_round": 5}),
            UnheardError,
            "Fixed-size sampling with noise",
        ),
    ],
)
def test_every_slip_is_named_with_its_cure(tables, spoil, error, message):
    spoil(tables)
    with pytest.raises(error, match=message):
        run_from_tables(tables)


def test_overrides_reach_any_key(tmp_path, run):
    file = tmp_path / "run.toml"
    file.write_text(run_toml(run))
    changed, engine = read_run_file(
        file,
        ["clip.norm=3", "update.learning_rate=0.25", "engine.kind=reference", "training.rounds=9", "server.kind=adam"],
    )
    assert changed.plan.clip == unheard.FlatClip(norm=3.0)
    assert changed.plan.update.learning_rate == 0.25
    assert changed.training.rounds == 9
    assert engine.kind == "reference"
    assert type(changed.server).__name__ == "AdamServer"


@pytest.mark.parametrize("bad", ["clip.norm", "norm=3", "=3", "clip.=3", "clip.norn=3"])
def test_bad_overrides_are_refused(tmp_path, run, bad):
    file = tmp_path / "run.toml"
    file.write_text(run_toml(run))
    words = "Did you mean 'norm'" if bad == "clip.norn=3" else "write table.key=value"
    with pytest.raises((InvalidValue, UnknownKey), match=words):
        read_run_file(file, [bad])
    with pytest.raises(InvalidValue, match="is not a table of keys"):
        read_run_file(file, ["clip.norm.more=3"])


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path):
    with pytest.raises(InvalidValue, match="unheard init"):
        read_run_file(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[clip\nnorm = 3")
    with pytest.raises(InvalidValue, match="not valid TOML"):
        read_run_file(tmp_path / "bad.toml")


def test_another_kind_by_override_drops_what_only_the_old_one_had(tmp_path, run):
    file = tmp_path / "run.toml"
    file.write_text(run_toml(run))
    baseline, _ = read_run_file(file, ["clip.kind=none", "noise.kind=none"])
    assert baseline.plan.clip == unheard.NoClip()
    assert baseline.plan.noise == unheard.NoNoise()
    per_layer, _ = read_run_file(file, ["clip.kind=per_layer"])
    assert per_layer.plan.clip == unheard.PerLayerClip(norm=CLIP_NORM)


@pytest.mark.parametrize("population", [60, 1_000, 763_430, 10**9])
def test_the_delta_of_a_run_is_the_declared_one_or_that_of_the_paper_to_the_last_digit(run, population):
    """A rounded delta is another delta: one below 10^-7 would become 0, or would be larger."""
    plan = replace(run.plan, population=population)
    own = replace(run, plan=plan, delta=None)
    assert own.claimed_delta == default_delta(population) == math.pow(population, -1.1)
    declared = 0.123456789012345 / population
    assert replace(own, delta=declared).claimed_delta == declared
    saved, _ = run_from_tables(tomllib.loads(run_toml(replace(own, delta=declared))))
    assert saved.claimed_delta == declared


def test_a_device_that_is_neither_a_cpu_nor_a_gpu_is_refused():
    for device in ("meta", "tpu"):
        with pytest.raises(InvalidValue, match="cannot be used here"):
            unheard.EngineChoice(device=device).torch_device()


@pytest.mark.parametrize("accountant", ["rdp", "moments"])
@pytest.mark.parametrize("delta", [None, 1.23456789e-6])
def test_a_budget_goes_to_toml_and_back_with_every_number(run, accountant, delta):
    with_delta = replace(run, delta=delta)
    budget = Budget(epsilon=3.25, delta=with_delta.claimed_delta, accountant=accountant)
    again, _ = run_from_tables(tomllib.loads(run_toml(replace(with_delta, budget=budget))))
    assert again.budget == budget
    assert again.claimed_delta == with_delta.claimed_delta
