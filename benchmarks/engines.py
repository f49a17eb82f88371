"""Compare the sums of the engines on the paper's model, with users of a corpus. (`unheard benchmark` measures speed.)

Run it: python benchmarks/engines.py CORPUS [--device cuda] [--users 12] [--engine stacked]

The script prints ||sum - exact|| / ||exact|| for each engine, precision, clip and kind of cell, where `exact` is the
sum of the reference engine in float64. It also checks that the contribution of a user does not depend, to the bit, on
the other users of the chunk.
"""

import argparse
import itertools

import numpy as np
import torch

import unheard
from unheard.engines.engine import Engine
from unheard.engines.reference import ReferenceEngine
from unheard.engines.stacked.engine import StackedEngine
from unheard.engines.vectorised import VectorisedEngine
from unheard.models.model import LanguageModel
from unheard.randomness import reproducible_generator
from unheard.updates.user_update import User


def plan_for(clip: unheard.FlatClip | unheard.PerLayerClip, model: LanguageModel):
    """Return the plan of a round with this clip."""
    return unheard.Plan(
        population=10_000,
        sampling=unheard.PoissonSampling(users_per_round=100),
        update=unheard.FedAvg(),
        clip=clip,
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    ).at(0, model.layout)


FAST = {"stacked": StackedEngine, "vectorised": VectorisedEngine}
"""The fast engines by name."""


def engines(model: LanguageModel, device: torch.device, chosen: list[str]) -> dict[str, Engine]:
    """Return the reference engine and the chosen fast engines in each precision, by title."""
    precisions = ("float32", "bfloat16") if device.type == "cuda" else ("float32",)
    return {
        "reference float32": ReferenceEngine(model, device),
        **{f"{kind.__name__} {p}": kind(model, device, None, p)
           for kind, p in itertools.product([FAST[name] for name in chosen], precisions)},
    }  # fmt: skip


def agreement(model: LanguageModel, users: list[User], device: torch.device, chosen: list[str]) -> None:
    """Print the relative error of each engine, with flat and with per-layer clipping."""
    for clip in (unheard.FlatClip(norm=15.0), unheard.PerLayerClip(norm=15.0)):
        plan, params_P = plan_for(clip, model), model.initial(0)
        exact = ReferenceEngine(model, device).sum_updates(params_P.double(), users, plan, reproducible_generator(0))
        truth_P = exact.units_P.cpu().double()
        for name, engine in engines(model, device, chosen).items():
            total = engine.sum_updates(params_P.to(device), users, plan, reproducible_generator(0))
            error = (total.units_P.cpu().double() - truth_P).norm() / truth_P.norm()
            print(f"{type(model).__name__}, {clip}: {name}: {error.item():.1e} from reference in float64", flush=True)


def independence(model: LanguageModel, users: list[User], device: torch.device, chosen: list[str]) -> None:
    """Print, for each fast engine, whether the sum of all users equals the sum without one user plus that user."""
    plan, params_P = plan_for(unheard.FlatClip(norm=15.0), model), model.initial(0).to(device)
    for name, engine in engines(model, device, chosen).items():
        if name.startswith("reference"):
            continue

        def total(some: list[User], engine: Engine = engine) -> torch.Tensor:
            """Return the sum of some users in integer units."""
            return engine.sum_updates(params_P, some, plan, reproducible_generator(0)).units_P

        apart = total(users[1:]) + total(users[:1])
        print(
            f"{name}: the sum of all is the sum without one plus that one: {torch.equal(total(users), apart)}",
            flush=True,
        )


def main() -> None:
    """Print the agreement of the engines for an LSTM and a GRU, and the independence of users."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words.add_argument("corpus")
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words.add_argument("--users", type=int, default=12)
    words.add_argument("--engine", action="append", choices=list(FAST), help="a fast engine to check; default: all")
    asked = words.parse_args()
    chosen = asked.engine or list(FAST)
    device, store = torch.device(asked.device), unheard.TokenStore.open(asked.corpus)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {where}, {asked.users} users", flush=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    users = [User(t, None, k) for k, t in enumerate(store.train.users(np.arange(asked.users)))]
    for cell in (unheard.TiedLSTM, unheard.TiedGRU):
        agreement(cell(vocabulary_size=len(store.vocabulary)), users, device, chosen)
    independence(unheard.TiedLSTM(vocabulary_size=len(store.vocabulary)), users, device, chosen)


if __name__ == "__main__":
    main()
