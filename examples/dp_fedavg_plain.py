"""DP-FedAvg on one page: the paper's Algorithm 1 in plain torch. The names are the symbols of the paper.

This file does not use the library; tests/agreement/test_plain_example.py checks that the library computes the same
result. It is for reading, not for use: it has no secure randomness, no integer grid and no ledger, on which the
guarantee of the library rests.

Run it: python examples/dp_fedavg_plain.py
"""

import math

import numpy as np
import torch
from torch import Tensor


def flat_clip(delta: Tensor, S: float) -> Tensor:
    """Return pi(delta, S) = delta * min(1, S / ||delta||), so that the norm is at most S (equation 1)."""
    norm = delta.double().norm().item()
    return delta * (S / norm) if norm > S else delta


def split_into_batches(tokens: np.ndarray, B: int, unroll: int) -> list[Tensor]:
    """Split the text of one user into batches of at most B windows.

    A window has `unroll` + 1 tokens. Its last token is only a target, and is the first token of the next window. The
    last window is padded with -1.
    """
    num_windows = math.ceil(max(len(tokens) - 1, 0) / unroll)
    padded = np.full(num_windows * unroll + 1, -1)
    padded[: len(tokens)] = tokens[: len(padded)]
    windows = [torch.tensor(padded[i * unroll : i * unroll + unroll + 1]) for i in range(num_windows)]
    return [torch.stack(windows[i : i + B]) for i in range(0, num_windows, B)]


def user_update_fedavg(tokens, theta0, loss, S, B, E, eta, unroll) -> Tensor:
    """Return the delta of one user: E epochs of SGD on their text, with a clip to S after each step (UserUpdate)."""
    theta = theta0
    for _ in range(E):
        for batch in split_into_batches(tokens, B, unroll):
            theta = theta.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(theta, batch), theta)
            theta = theta - eta * gradient
            theta = theta0 + flat_clip(theta - theta0, S)
    return (theta - theta0).detach()  # clipped after the last step, so its norm is at most S


def dp_fedavg(
    users, theta, loss, *, q, W, w_hat, z, S, B, E, eta, unroll, rounds, sampling, noise, project=lambda t: t
):
    """Yield the parameters after each round: the main loop with the fixed-denominator estimator.

    `sampling(t)` and `noise(t)` return the random generators of round t. `project` is applied to the new parameters.
    """
    weights = [min(len(tokens) / w_hat, 1.0) for tokens in users]
    sigma = z * S / (q * W)
    for t in range(rounds):
        rng = sampling(t)
        cohort = rng.choice(len(users), size=rng.binomial(len(users), q), replace=False, shuffle=False)
        total = torch.zeros(len(theta), dtype=torch.float64)
        for k in cohort:
            total += weights[k] * user_update_fedavg(users[k], theta, loss, S, B, E, eta, unroll).double()
        average = total / (q * W)
        noisy = average + sigma * torch.from_numpy(noise(t).standard_normal(len(theta)))
        theta = project((theta + noisy).to(theta.dtype))
        yield theta


def main() -> None:
    """Train a bigram model (a table of scores for each pair of words) on synthetic users and print its accuracy.

    The text of a user counts 3, 4, 5, ..., but every fifth token on average is random.
    """
    V, K, q, rounds = 30, 400, 0.1, 40
    rng = np.random.default_rng(0)

    def a_user() -> np.ndarray:
        """Return the text of one user: 121 token ids."""
        tokens = [3]
        for _ in range(120):
            tokens.append((tokens[-1] - 3 + 1) % (V - 3) + 3 if rng.random() < 0.8 else int(rng.integers(3, V)))
        return np.array(tokens)

    def scores_and_targets(theta: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores [N, V] and the target [N] of each position that is not padding."""
        inputs, targets = batch[:, :-1].flatten(), batch[:, 1:].flatten()
        real = targets >= 0
        return theta.view(V, V)[inputs[real]], targets[real]

    def loss(theta: Tensor, batch: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(*scores_and_targets(theta, batch))

    users, test = [a_user() for _ in range(K)], torch.tensor(a_user())[None]
    settings = dict(q=q, W=K, w_hat=100, z=1.0, S=1.0, B=4, E=1, eta=1.0, unroll=10, rounds=rounds)
    steps = dp_fedavg(users, torch.zeros(V * V), loss, **settings, sampling=lambda t: rng, noise=lambda t: rng)
    for t, theta in enumerate(steps, start=1):
        if t % 10 == 0:
            scores, targets = scores_and_targets(theta, test)
            print(
                f"round {t:3d}: {100 * (scores.argmax(1) == targets).float().mean():.0f} % of a new user's next words right"
            )


if __name__ == "__main__":
    main()
