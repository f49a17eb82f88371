"""Measure the time that correlated noise adds to a round: seconds per round with independent, banded and BLT noise.

    python -m benchmarks.correlated_overhead --seconds 60                  # the paper's model, 1,250 and 100 users per round
    python -m benchmarks.correlated_overhead --seconds 20 --users 20 --small

The kinds of noise train in turn, several times, in one process; the medians are compared. All draw their cohorts by
Poisson sampling, so that cohorts have the same size and only the noise differs. The time of cyclic sampling, and of
saving the history of the noise, is measured separately.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

import unheard
from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.mechanism.aggregation import BoundedAverage
from unheard.mechanism.correlated import CorrelatedNormals, NoiseHistory
from unheard.mechanism.noise import in_units, standard_normals
from unheard.mechanism.sampling import CyclicPoissonSampling, MinSeparationSampling, Turn
from unheard.parameters import finish
from unheard.performance.benchmark import benchmark_plan, synthetic_users
from unheard.privacy.matrix_factorization import optimise
from unheard.randomness import reproducible_generator, secure_generator

POPULATION = 750_000


def noises(bands: int) -> dict[str, tuple]:
    """Return the kinds of noise to compare, each with its sampling (None for the sampling of the plan)."""
    return {
        "independent": (None, unheard.GaussianNoise(noise_multiplier=1.0)),
        f"banded, {bands} bands": (
            CyclicPoissonSampling(users_per_round=1000, groups=bands),
            unheard.CorrelatedNoise(noise_multiplier=1.0, rounds=1500),
        ),
        "BLT, 3 buffers": (
            MinSeparationSampling(separation=750),
            unheard.CorrelatedNoise(noise_multiplier=1.0, rounds=1500, strategy="blt"),
        ),
    }


def poisson(users_per_round: int):
    """Return a replacement of the method `draw` of cyclic and minimum-separation sampling, with Poisson sampling."""
    sampler = unheard.PoissonSampling(users_per_round=users_per_round)
    return lambda self, num_users, population, rng, turn=None: sampler.draw(num_users, num_users, rng)


def seconds_per_round(run, choice, folder: Path, warm_up: int) -> list[float]:
    """Return the seconds of each round after the first `warm_up`, without the last, which saves and evaluates."""
    times, device = [], choice.torch_device()
    for _ in unheard.train(run, folder, engine=choice):
        finish(device)
        times.append(time.perf_counter())
    return [b - a for a, b in zip(times[warm_up:-1], times[warm_up + 1 : -1], strict=False)]


def whole_rounds(model, choice, users: list[int], bands: int, until: float, population: int) -> list[dict]:
    """Measure whole rounds, by kind of noise and users per round.

    Args:
        model: The model.
        choice: The engine.
        users: Numbers of users per round.
        bands: Number of bands of the banded noise.
        until: A time of `time.monotonic`. No measurement begins after it, except in the first repetition.
        population: Users of the temporary store.

    Returns:
        One row for each kind of noise and number of users, with the median time of a round in milliseconds.
    """
    samples: dict[tuple[int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(
            Path(folder) / "store",
            train=[user.tokens for user in synthetic_users(model.vocabulary_size, population, 1600)],
            held_out=[user.tokens for user in synthetic_users(model.vocabulary_size, 2, 200)],
            vocabulary=Vocabulary.of([f"w{k}" for k in range(model.vocabulary_size - 3)]),
            info={
                "tokens": {"kind": "words"},
                "vocabulary": {"kind": "file", "source": "synthetic"},
                "synthetic": True,
            },
        )
        for repetition in range(4):
            for per_round in users:
                for name, (sampling, noise) in noises(bands).items():
                    if repetition and time.monotonic() > until:
                        break
                    plan = benchmark_plan(per_round, POPULATION)
                    plan = replace(plan, noise=noise, sampling=sampling or plan.sampling)
                    run = unheard.Run(
                        corpus=store.path,
                        model=model,
                        plan=plan,
                        training=unheard.Training(rounds=8 if per_round > 500 else 40, checkpoint_every=10**6),
                        evaluation=unheard.Evaluation(every=10**6, max_tokens=200),
                    )
                    draw = poisson(per_round)
                    with (
                        patch.object(unheard.PoissonSampling, "draw", draw_for_all(per_round)),
                        patch.object(CyclicPoissonSampling, "draw", draw),
                        patch.object(MinSeparationSampling, "draw", draw),
                        patch("unheard.training.loop.write_statement", lambda *_: {}),
                    ):
                        out = Path(folder) / f"{repetition}-{per_round}-{name.split(',')[0]}"
                        took = seconds_per_round(run, choice, out, warm_up=2)
                    samples.setdefault((per_round, name), []).extend(took)
                    print(f"{per_round} users, {name}: {1000 * statistics.median(took):.2f} ms", flush=True)
    rows = []
    for (per_round, name), took in samples.items():
        base = statistics.median(samples[per_round, "independent"])
        each = statistics.median(took)
        rows.append(
            {"users": per_round, "noise": name, "ms": 1000 * each, "rounds": len(took), "more": each / base - 1}
        )
    return rows


def draw_for_all(users_per_round: int):
    """Return a function for `PoissonSampling.draw` that always draws `users_per_round` expected users of the store."""
    real = unheard.PoissonSampling.draw
    sampler = unheard.PoissonSampling(users_per_round=users_per_round)
    return lambda self, num_users, population, rng: real(sampler, num_users, num_users, rng)


def parts(parameters: int, device: torch.device, bands: int) -> list[dict]:
    """Return the milliseconds of single parts of a round.

    The parts are: adding noise whose normals are already drawn, saving the history, and drawing a cohort.

    Args:
        parameters: Number of parameters.
        device: Device of the noise.
        bands: Number of bands of the banded noise.
    """
    from unheard.training.noise_state import _write_history

    rows = []
    average = BoundedAverage(
        units_P=torch.zeros(parameters, dtype=torch.int64, device=device), unit=2.0**-20, sensitivity=1.0
    )

    def timed(work, times: int = 5) -> float:
        """Return the median milliseconds of the function that `work` prepares and returns."""
        taken = []
        for _ in range(times):
            ready = work()
            finish(device)
            began = time.perf_counter()
            ready()
            finish(device)
            taken.append(time.perf_counter() - began)
        return 1000 * statistics.median(taken)

    def independent():
        noise = unheard.GaussianNoise(noise_multiplier=1.0)
        scale = in_units(noise.std(average.sensitivity), average.unit)
        normals = noise.ahead(secure_generator(), parameters, device, scale)
        time.sleep(0.1)
        return lambda: noise.add(average, normals)

    rows.append({"part": "add independent noise", "ms": timed(independent)})
    for name, matrix in (
        (f"banded, {bands} bands", optimise("banded", rounds=1500, separation=bands)),
        ("BLT, 3 buffers", optimise("blt", rounds=1500, separation=750)),
    ):
        history = NoiseHistory(matrix, parameters, device)
        history.index = 1000 if matrix.strategy == "banded" else 0
        noise = unheard.CorrelatedNoise(noise_multiplier=1.0, rounds=1500, strategy=matrix.strategy)

        def correlated(noise=noise, history=history):
            normals = CorrelatedNormals(secure_generator().bytes(16), history, parameters, device)
            time.sleep(0.1)
            return lambda: noise.add(average, normals)

        rows.append({"part": f"add {name}", "ms": timed(correlated)})
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "history"
            ms = timed(
                lambda path=path, history=history: lambda: _write_history(path, {"index": 0}, history.rows), times=1
            )
        rows.append({"part": f"save the history of {name}", "ms": ms, "megabytes": history.rows.numel() * 8 / 1e6})
    sampler, key = CyclicPoissonSampling(users_per_round=1000, groups=bands), secure_generator().bytes(16)
    sampler.draw(POPULATION, POPULATION, secure_generator(), Turn(index=0, groups_key=key))
    rows.append(
        {
            "part": "draw a cohort of 750,000 users",
            "ms": timed(
                lambda: lambda: sampler.draw(POPULATION, POPULATION, secure_generator(), Turn(index=1, groups_key=key))
            ),
        }
    )
    return rows


def agrees(device: torch.device) -> bool:
    """Return whether the correlated noise has the same bits on a device and on the CPU."""
    for matrix in (optimise("banded", rounds=100, separation=9), optimise("blt", rounds=100, separation=20)):
        histories = [NoiseHistory(matrix, 5000, where) for where in (device, torch.device("cpu"))]
        for index in range(25):
            normals_P = standard_normals(reproducible_generator(index), 5000, torch.device("cpu"))
            one, other = (h.next(normals_P.to(where)) for h, where in zip(histories, (device, "cpu"), strict=True))
            if not torch.equal(one.cpu(), other):
                return False
    return True


def main() -> None:
    """Run all measurements, print them and, on request, write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds after which no further repetition begins")
    parser.add_argument("--users", type=int, nargs="+", default=[1250, 100])
    parser.add_argument("--bands", type=int, default=48)
    parser.add_argument("--population", type=int, default=4000, help="users of the temporary store")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    choice = unheard.EngineChoice()
    device = choice.torch_device()
    sizes = dict(vocabulary_size=50, embedding_size=4, hidden_size=4) if options.small else {}
    model = unheard.TiedLSTM(**{"vocabulary_size": 10_000, **sizes})
    print("noise on this device and on the CPU agree to the bit:", agrees(device), flush=True)
    rows: dict = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"}
    rows["parts"] = parts(model.layout.total, device, options.bands)
    for row in rows["parts"]:
        print(row, flush=True)
    rows["rounds"] = whole_rounds(model, choice, options.users, options.bands, until, options.population)
    for row in rows["rounds"]:
        print(
            f"{row['users']:>6} users  {row['noise']:<20} {row['ms']:8.2f} ms per round  {row['more']:+.1%}", flush=True
        )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
