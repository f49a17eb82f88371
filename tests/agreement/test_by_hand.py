"""Algorithm 1 agrees with plain numpy, for a model of three parameters.

The cases are both estimators, both clips, unequal weights, a user with NaN, and an empty cohort. The model has one score
for each of three words, independent of the input, so the gradient of the mean loss is softmax - frequencies.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

import unheard
from unheard.engines.reference import ReferenceEngine
from unheard.engines.vectorised import VectorisedEngine
from unheard.randomness import reproducible_generator
from unheard.updates.user_update import User

THETA0 = np.array([0.3, -0.2, 0.1])
USERS = [np.array([3, 3, 4, 3, 5]), np.array([4, 4]), np.array([5, 3, 5, 5, 5, 5, 5, 4]), np.array([3])]
ETA, UNROLL, CAP, Q, W, W_MIN = 3.0, 2, 5.0, 0.5, 6.0, 4.0


class ThreeScores(nn.Module):
    """One score for each of the words 3, 4 and 5, in two layers (`first` and `rest`) for per-layer clipping.

    Special tokens are never predicted. UNK as an input gives NaN, for tests of a user whose update is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor(THETA0[:1], dtype=torch.float32))
        self.rest = nn.Parameter(torch.tensor(THETA0[1:], dtype=torch.float32))

    def forward(self, tokens):
        special, score = torch.full((3,), -1e9), torch.cat([self.first, self.rest])
        scores = torch.cat([special, score]).expand(*tokens.shape, 6)
        return scores * torch.where(tokens == 2, torch.nan, 1.0)[..., None]  # UNK as an input gives NaN


def clip_by_hand(delta, clip):
    if isinstance(clip, unheard.NoClip):
        return delta
    parts = [slice(0, 3)] if isinstance(clip, unheard.FlatClip) else [slice(0, 1), slice(1, 3)]
    bounds = [clip.norm] if isinstance(clip, unheard.FlatClip) else [clip.norms["first"], clip.norms["rest"]]
    delta = delta.copy()
    for part, bound in zip(parts, bounds, strict=True):
        delta[part] *= min(1.0, bound / max(np.linalg.norm(delta[part]), 1e-30))
    return delta


def update_by_hand(tokens, clip):
    theta = THETA0.copy()
    targets = tokens[1:]
    for start in range(0, len(targets), UNROLL):  # B = 1: a batch is one window
        window = targets[start : start + UNROLL]
        frequency = np.array([(window == word).mean() for word in (3, 4, 5)])
        softmax = np.exp(theta) / np.exp(theta).sum()
        theta = THETA0 + clip_by_hand(theta - ETA * (softmax - frequency) - THETA0, clip)
    return theta - THETA0


CLIPS = [unheard.FlatClip(norm=0.8), unheard.PerLayerClip(norms={"first": 0.3, "rest": 1.1}), unheard.NoClip()]
ESTIMATORS = [unheard.FixedDenominator(), unheard.ClippedDenominator(min_total_weight=W_MIN), unheard.TrueAverage()]


def bound_by_hand(clip):
    return clip.norm if isinstance(clip, unheard.FlatClip) else math.sqrt(sum(s * s for s in clip.norms.values()))


@pytest.mark.parametrize("engine", [ReferenceEngine, VectorisedEngine])
@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("cohort", [[0, 1, 2, 3], [2], [0, 1, "nan"], []], ids=str)
def test_algorithm_1_by_hand(engine, clip, estimator, cohort):
    model = unheard.ModuleModel.wrap(ThreeScores(), vocabulary_size=6)
    plan = unheard.Plan(
        population=10,
        sampling=unheard.PoissonSampling(sampling_prob=Q),
        weights=unheard.CappedWeights(weight_cap=CAP, total_weight=W),
        update=unheard.FedAvg(batch_size=1, unroll=UNROLL, learning_rate=ETA),
        clip=clip,
        estimator=estimator,
        noise=unheard.NoNoise(),
    ).at(0, model.layout)
    params = model.layout.join(dict(ThreeScores().named_parameters())).detach()

    chosen = [np.array([3, 2, 3, 4]) if k == "nan" else USERS[k] for k in cohort]
    total = engine(model).sum_updates(params, [User(tokens) for tokens in chosen], plan, reproducible_generator(1))

    weights = [min(len(tokens) / CAP, 1.0) for tokens in chosen]
    weighted = [w * update_by_hand(t, clip) for w, t, k in zip(weights, chosen, cohort, strict=True) if k != "nan"]
    numerator = np.sum([np.zeros(3), *weighted], axis=0)
    if isinstance(estimator, unheard.FixedDenominator):
        expected, sensitivity = numerator / (Q * W), lambda S: S / (Q * W)
    elif isinstance(estimator, unheard.ClippedDenominator):
        expected, sensitivity = numerator / max(Q * W_MIN, sum(weights)), lambda S: 2 * S / (Q * W_MIN)
    else:
        expected, sensitivity = numerator / sum(weights) if weights else numerator, lambda S: math.inf
    average = plan.average(total)
    np.testing.assert_allclose(average.average_P.numpy(), expected, atol=2e-6)
    S = math.inf if isinstance(clip, unheard.NoClip) else bound_by_hand(clip)
    assert average.sensitivity == pytest.approx(sensitivity(S), rel=1e-5)


def test_without_clip_and_noise_the_true_average_is_plain_fedavg(store, model):
    """The mean of the users' models, each trained alone with torch's own SGD."""
    users = [User(store.train.tokens(k)) for k in range(5)]
    plan = unheard.Plan(
        population=60, sampling=unheard.FixedSizeSampling(users_per_round=5), clip=unheard.FlatClip(norm=1e6),
        update=unheard.FedAvg(batch_size=2, unroll=5, learning_rate=0.5), estimator=unheard.TrueAverage(), noise=unheard.NoNoise(),
    ).at(0, model.layout)  # fmt: skip
    theta0, ends = model.initial(0), []
    for user in users:
        theta = theta0.clone().requires_grad_()
        sgd = torch.optim.SGD([theta], lr=0.5)
        for batch in plan.update.batches(user, 0):
            sgd.zero_grad()
            windows = torch.tensor(batch)
            logits = model.logits(model.layout.split(theta), windows[:, :-1].clamp(min=0), None)
            targets = windows[:, 1:].masked_fill((windows[:, 1:] == 0) | (windows[:, :-1] < 0), -1).flatten()
            if (targets >= 0).any():
                nn.functional.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-1).backward()
                sgd.step()
        ends.append(theta.detach())
    ours = (
        theta0
        + plan.average(VectorisedEngine(model).sum_updates(theta0, users, plan, reproducible_generator(0))).average_P
    )
    torch.testing.assert_close(ours.float(), torch.stack(ends).mean(0), atol=2e-6, rtol=0)
