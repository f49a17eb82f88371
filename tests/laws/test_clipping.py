"""Flat and per-layer clips: the norm of a clipped update is at most the bound."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from unheard.errors import InvalidValue
from unheard.mechanism.clipping import FlatClip, NoClip, PerLayerClip, clip_
from unheard.parameters import Layout

LAYOUT = Layout((("a", (2,)), ("b", (1, 2)), ("c", (1,))))
deltas = hnp.arrays("float32", (3, 5), elements=st.floats(-1e6, 1e6, width=32))


def norms(delta_UP: torch.Tensor) -> list[float]:
    return delta_UP.double().norm(dim=-1).tolist()


@given(deltas, st.floats(1e-3, 1e3))
def test_flat_clipping_bounds_every_norm_and_leaves_short_updates_alone(delta, S):
    before = torch.from_numpy(delta.copy())
    after = clip_(before.clone(), FlatClip(norm=S).balls(LAYOUT))
    for k in range(3):
        assert norms(after)[k] <= S * (1 + 1e-6)
        if norms(before)[k] <= S:
            assert torch.equal(after[k], before[k])


@given(deltas, st.floats(1e-3, 1e3))
def test_clipping_keeps_the_direction(delta, S):
    before = torch.from_numpy(delta.copy()).double()
    after = clip_(before.clone(), FlatClip(norm=S).balls(LAYOUT))
    torch.testing.assert_close(after * before.norm(dim=-1, keepdim=True), before * after.norm(dim=-1, keepdim=True))


@given(deltas, st.floats(1e-3, 1e3))
def test_per_layer_clipping_bounds_each_layer_and_so_the_whole(delta, S):
    clip = PerLayerClip(norm=S)
    after = clip_(torch.from_numpy(delta.copy()), clip.balls(LAYOUT))
    for layer in LAYOUT.split(after).values():
        assert all(n <= S / math.sqrt(3) * (1 + 1e-6) for n in norms(layer.flatten(1)))
    assert all(n <= clip.l2_bound(LAYOUT) * (1 + 1e-6) for n in norms(after))


def test_the_bound_of_per_layer_clipping_is_the_root_of_the_sum_of_squares():
    assert PerLayerClip(norms={"a": 3.0, "b": 4.0, "c": 12.0}).l2_bound(LAYOUT) == pytest.approx(13.0)
    assert PerLayerClip(norm=5.0).l2_bound(LAYOUT) == pytest.approx(5.0)
    assert PerLayerClip(norm=5.0).l2_bound(LAYOUT) >= 5.0 / math.sqrt(3)


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3))
@example([581.4345320113916] * 3)  # float64 rounds down in all four steps
def test_the_bound_of_per_layer_clipping_is_never_below_the_exact_root(radii):
    clip = PerLayerClip(norms=dict(zip("abc", radii, strict=True)))
    assert Fraction(clip.l2_bound(LAYOUT)) ** 2 >= sum(Fraction(r) ** 2 for r in radii)


def test_per_layer_clipping_by_hand():
    delta = torch.tensor([3.0, 4.0, 0.6, 0.8, -7.0])
    clip_(delta, PerLayerClip(norms={"a": 1.0, "b": 2.0, "c": 0.5}).balls(LAYOUT))
    torch.testing.assert_close(delta, torch.tensor([0.6, 0.8, 0.6, 0.8, -0.5]))


def test_a_schedule_scales_given_layer_norms_together():
    assert PerLayerClip(norms={"a": 3.0, "b": 4.0}).at_norm(10.0).norms == pytest.approx({"a": 6.0, "b": 8.0})
    scaled = PerLayerClip(norms={"a": 3.0, "b": 4.0}).at_norm(10.4567).norms
    assert scaled == pytest.approx({"a": 0.6 * 10.4567, "b": 0.8 * 10.4567}, rel=1e-12)


def test_a_nan_is_not_taken_for_a_short_update():
    delta = clip_(torch.tensor([[math.nan, 100.0, 0, 0, 0]]), FlatClip(norm=1.0).balls(LAYOUT))
    assert delta.isnan().any()


def test_no_clip_has_no_bound():
    assert NoClip().l2_bound(LAYOUT) == math.inf
    assert NoClip().balls(LAYOUT) == []


@pytest.mark.parametrize("norm", [0.0, -1.0, math.inf, math.nan])
def test_impossible_norms_are_refused(norm):
    with pytest.raises(InvalidValue):
        FlatClip(norm=norm)
    with pytest.raises(InvalidValue):
        PerLayerClip(norm=norm)


def test_a_layer_that_the_model_lacks_is_refused_with_the_nearest_name():
    with pytest.raises(InvalidValue, match=r"lacks.*Known: a, b, c"):
        PerLayerClip(norms={"x": 1.0}).balls(LAYOUT)
    with pytest.raises(InvalidValue, match="lacks b, c"):
        PerLayerClip(norms={"a": 1.0}).balls(LAYOUT)


@given(deltas, st.floats(1e-3, 1e3))
def test_a_user_counts_as_clipped_if_any_layer_was(delta, S):
    before = torch.from_numpy(delta)
    unclipped_U = torch.tensor([True, True, False])  # the last user was clipped in an earlier local step
    after = clip_(before.clone(), PerLayerClip(norm=S).balls(LAYOUT), unclipped_U)
    short_MU = [layer.double().flatten(1).norm(dim=1) <= S / math.sqrt(3) for layer in LAYOUT.split(before).values()]
    assert unclipped_U.tolist() == [*torch.stack(short_MU).all(dim=0)[:2].tolist(), False]
    assert all(torch.equal(after[k], before[k]) for k in range(3) if torch.stack(short_MU)[:, k].all())
