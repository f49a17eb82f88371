"""How fast is each engine, and how far do their sums differ? On the paper's model with users of one corpus.

Run it: python benchmarks/engines.py CORPUS [--device cuda] [--users 256] [--reference-users 12]
Agreement is ||sum - reference|| / ||reference||, at float32 and float64, for both clips. Speed is users/s of whole user updates,
clip after every step and the integer sum included.
"""

import argparse
import time

import numpy as np
import torch

import unheard
from unheard.engines.reference import ReferenceEngine
from unheard.engines.vectorised import VectorisedEngine
from unheard.randomness import reproducible_generator
from unheard.updates.user import User


def plan_for(clip: unheard.FlatClip | unheard.PerLayerClip, model: unheard.TiedLSTM):
    return unheard.Plan(
        population=10_000,
        sampling=unheard.PoissonSampling(users_per_round=100),
        update=unheard.FedAvg(),
        clip=clip,
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    ).at(0, model.layout)


def agreement(model: unheard.TiedLSTM, users: list[User], device: torch.device) -> None:
    for clip in (unheard.FlatClip(norm=15.0), unheard.PerLayerClip(norm=15.0)):
        plan, sums = plan_for(clip, model), {}
        for dtype in (torch.float32, torch.float64):
            params_P = model.initial(0).to(dtype)
            for engine in (ReferenceEngine(model, device), VectorisedEngine(model, device)):
                total = engine.sum_updates(params_P, users, plan, reproducible_generator(0))
                sums[type(engine).__name__, dtype] = total.units_P.cpu().double()
        truth = sums["ReferenceEngine", torch.float64]
        for key, total in sums.items():
            print(
                f"{clip}: {key[0]} {key[1]}: {((total - truth).norm() / truth.norm()).item():.1e} from reference in float64",
                flush=True,
            )


def speed(model: unheard.TiedLSTM, users: list[User], device: torch.device) -> None:
    plan, params_P = plan_for(unheard.FlatClip(norm=15.0), model), model.initial(0)
    for at_once in (16, 64, 256) if device.type == "cuda" else (1, 2, 4, 8):
        engine = VectorisedEngine(model, device, users_at_once=at_once)
        engine.sum_updates(params_P, users[:at_once], plan, reproducible_generator(0))
        began = time.perf_counter()
        engine.sum_updates(params_P, users, plan, reproducible_generator(0)).units_P.cpu()
        print(
            f"vectorised, {at_once} users at once: {len(users) / (time.perf_counter() - began):.1f} users/s", flush=True
        )


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words.add_argument("corpus")
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    words.add_argument("--users", type=int, default=256)
    words.add_argument("--reference-users", type=int, default=12)
    asked = words.parse_args()
    device, store = torch.device(asked.device), unheard.TokenStore.open(asked.corpus)
    model = unheard.TiedLSTM(vocabulary_size=len(store.vocabulary))
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, {asked}",
        flush=True,
    )
    users = [User(t) for t in store.train.users(np.arange(asked.users))]
    agreement(model, users[: asked.reference_users], device)
    speed(model, users, device)


if __name__ == "__main__":
    main()
