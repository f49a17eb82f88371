"""Measure the speed of FedSGD with the engine `vectorised`, compiled and not compiled, in users per second.

Run it: python benchmarks/fedsgd.py CORPUS [--users 50] [--rounds 20] [--batch 200] [--device cuda]

FedSGD takes one gradient step per user, on a batch of fixed size. The script sums cohorts of the corpus's users with
and without compilation, and with several numbers of users at once. For each combination it prints the speed, the time
of the first round, which compiles, and the relative distance of its sum from that of the first combination.
"""

import argparse
import time

import numpy as np
import torch

import unheard
from unheard.engines.vectorised import VectorisedEngine
from unheard.parameters import finish
from unheard.randomness import reproducible_generator
from unheard.updates.user_update import User

WARM_UP = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
"""Sizes of the rounds that are not timed, as fractions of the users per round. Code that depends on the number of users
is compiled in these rounds."""


def main() -> None:
    """Draw the cohorts, and time and print each combination."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("corpus")
    options.add_argument("--users", type=int, default=50)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--batch", type=int, default=200)
    options.add_argument(
        "--at-once", type=int, nargs="*", default=[0, 64, 16], help="users at once; 0: the engine chooses"
    )
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = options.parse_args()
    device, store = torch.device(chosen.device), unheard.TokenStore.open(chosen.corpus)
    model = unheard.TiedLSTM(vocabulary_size=len(store.vocabulary))
    plan = unheard.Plan(
        population=store.train.num_users,
        sampling=unheard.PoissonSampling(users_per_round=chosen.users),
        update=unheard.FedSGD(batch_size=chosen.batch),
        clip=unheard.FlatClip(norm=2.0),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    ).at(0, model.layout)
    rng = reproducible_generator(0)
    warm_up = [max(1, round(part * chosen.users)) for part in WARM_UP]
    sizes = [chosen.users, *warm_up, *rng.poisson(chosen.users, size=chosen.rounds)]
    cohorts = [_users(store, rng.choice(store.train.num_users, size=n, replace=False)) for n in sizes]
    params_P, first = model.initial(0).to(device), None
    for is_compiled in (False, True) if device.type == "cuda" else (False,):
        for at_once in chosen.at_once:
            engine = VectorisedEngine(model, device, at_once or None)
            if not is_compiled:
                engine._compiled["step"] = False

            def run(users: list[User], engine: VectorisedEngine = engine) -> torch.Tensor:
                """Return the sum of a cohort when the device has finished it."""
                total = engine.sum_updates(params_P, users, plan, reproducible_generator(1)).units_P
                finish(device)
                return total

            began = time.perf_counter()
            total_P = run(cohorts[0]).double()
            opening = time.perf_counter() - began
            began = time.perf_counter()
            for cohort in cohorts[1 : 1 + len(warm_up)]:
                run(cohort)
            warming = time.perf_counter() - began
            began = time.perf_counter()
            for cohort in cohorts[1 + len(warm_up) :]:
                run(cohort)
            speed = sum(map(len, cohorts[1 + len(warm_up) :])) / (time.perf_counter() - began)
            first = total_P if first is None else first
            away = ((total_P - first).norm() / first.norm()).item()
            print(
                f"{'compiled' if is_compiled else 'as it comes'}, {at_once or 'chosen'} at once: {speed:,.0f} users/s; first round "
                f"{opening:.1f} s, next {len(warm_up)} {warming:.1f} s; sum {away:.1e} away",
                flush=True,
            )


def _users(store: unheard.TokenStore, numbers: np.ndarray) -> list[User]:
    """Return the training users with these numbers."""
    return [User(tokens, number=int(k)) for k, tokens in zip(numbers, store.train.users(numbers), strict=True)]


if __name__ == "__main__":
    main()
