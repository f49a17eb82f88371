"""Objects that hold what users wrote, what they add, keys or noise show none of it when they are printed.

Whatever is printed may end up in a log, in the message of an error or in a traceback that somebody sends around.
"""

import dataclasses
import importlib
import pkgutil

import pytest

PRIVATE_TYPES = ("ndarray", "Tensor", "bytes", "Generator", "list[str]")
"""What users wrote, updates, sums, keys and noise are of these types; so are public numbers."""
PUBLIC = {"NoisyAverage", "Released", "CanaryUsers", "ScanSummary"}
"""Classes whose arrays may be published, or have nothing to do with users."""
PACKAGES = ("mechanism", "updates", "engines", "training", "audit", "corpus", "evaluation", "models")
LEFT_OUT = ("kernels", "spark", "synthetic", "measures.Counts", "measures.Measured")
"""Code that runs on a GPU or in Spark, text that nobody wrote, and counts of words of public or held-out text."""


def modules() -> list[str]:
    """The modules through which users' text and noise go."""
    found = []
    for package in PACKAGES:
        folder = importlib.import_module(f"unheard.{package}").__path__
        found += [module.name for module in pkgutil.walk_packages(folder, f"unheard.{package}.") if not module.ispkg]
    return [name for name in found if not any(part in name for part in LEFT_OUT)]


def shown_fields(name: str) -> list[str]:
    """The fields of a module's dataclasses that may hold something private and are part of what is printed."""
    module = importlib.import_module(name)
    shown = []
    for kind in vars(module).values():
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == name):
            continue
        if kind.__name__ in PUBLIC or not kind.__dataclass_params__.repr:  # pyright: ignore
            continue
        for field in dataclasses.fields(kind):
            is_call = "Callable" in str(field.type)
            if field.repr and not is_call and any(part in str(field.type) for part in PRIVATE_TYPES):
                shown.append(f"{name.split('.')[-1]}.{kind.__name__}.{field.name}")
    return [field for field in shown if not any(part in field for part in LEFT_OUT)]


@pytest.mark.parametrize("name", modules())
def test_arrays_keys_and_texts_are_not_part_of_what_is_printed(name):
    assert shown_fields(name) == []


def test_a_drawn_seed_is_not_part_of_what_is_printed():
    from unheard.engines.engine import Drawn
    from unheard.randomness import ReproducibleStreams

    for printed in (Drawn(987_654_321), ReproducibleStreams(seed=987_654_321)):
        assert "987654321" not in repr(printed)


def test_the_rule_finds_an_array_that_is_shown(monkeypatch):
    from unheard.mechanism import aggregation

    shown = dataclasses.make_dataclass("Shown", [("units_P", "Tensor")])
    shown.__module__ = aggregation.__name__
    monkeypatch.setattr(aggregation, "Shown", shown, raising=False)
    assert shown_fields(aggregation.__name__) == ["aggregation.Shown.units_P"]


@pytest.mark.parametrize(
    "name",
    [
        "mechanism.aggregation.CohortSum.weight",
        "mechanism.aggregation.CohortSum.balance",
        "updates.user_update.User.number",
        "engines.engine.Drawn.seed",
        "randomness.ReproducibleStreams.seed",
    ],
)
def test_numbers_that_come_from_a_cohort_or_reveal_its_noise_are_not_printed(name):
    """Other numbers of these classes are public, so the type does not tell."""
    module, kind, field = name.rsplit(".", 2)
    fields = dataclasses.fields(getattr(importlib.import_module(f"unheard.{module}"), kind))
    assert [each.repr for each in fields if each.name == field] == [False]
