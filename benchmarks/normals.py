"""Measure how fast the noise of a round is drawn, and how much time it adds to whole rounds.

    OMP_NUM_THREADS=1 python -m benchmarks.normals                    # on a CPU, by number of threads
    python -m benchmarks.normals --device cuda --share 1000 5000      # on a GPU, and its share of rounds of short texts

On a CPU the script prints the float64 normals per second on one core (correlated noise uses them), and the time until
the integers of a round's noise are drawn and added. On a GPU it prints only this time. `--share` trains whole rounds of
users of 80 tokens, alternately with and without noise, and prints the time per round of each and the ratio of their
medians.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from unheard import GaussianNoise, NoNoise, TiedLSTM
from unheard.engines.choice import EngineChoice
from unheard.mechanism import noise as noise_module
from unheard.mechanism.aggregation import BoundedAverage
from unheard.parameters import finish
from unheard.performance.benchmark import SHORT_TEXT, whole_rounds
from unheard.randomness import GENERATOR, secure_generator

REPEATS = 35
"""Repetitions of a measurement, of which the least counts."""
DRAWS = 10_000_000
"""Number of float64 normals in one measurement."""
SCALE = noise_module.in_units(1.0, 2.0**-20)
"""Standard deviation of the noise in units of the grid."""
NOISE = GaussianNoise(noise_multiplier=1.0)


def least(work: Callable[[], object], repeats: int = REPEATS) -> tuple[float, float]:
    """Call a function several times; return the least elapsed milliseconds and the least processor milliseconds."""
    elapsed, busy = [], []
    for _ in range(repeats):
        began, used = time.perf_counter(), time.process_time()
        work()
        elapsed.append(time.perf_counter() - began)
        busy.append(time.process_time() - used)
    return 1e3 * min(elapsed), 1e3 * min(busy)


def draw(average: BoundedAverage) -> None:
    """Draw and add the noise of a round."""
    count, device = average.units_P.numel(), average.units_P.device
    NOISE.add(average, NOISE.ahead(secure_generator(), count, device, SCALE))
    finish(device)


def share(users: int, device: str, times: int) -> None:
    """Print the time of whole rounds with and without noise.

    Args:
        users: Users per round.
        device: Device of the engine.
        times: Number of measurements of each.
    """
    model, choice = TiedLSTM().pinned(10_000), EngineChoice(kind="stacked", device=device)
    rounds = max(4, 16_000_000 // SHORT_TEXT // users)
    taken: dict[str, list[float]] = {"with noise": [], "without": []}
    for _ in range(times):
        for name, noise in (("with noise", NOISE), ("without", NoNoise())):
            row = whole_rounds(model, choice, users, tokens=SHORT_TEXT, rounds=rounds, noise=noise)
            taken[name].append(1e3 / row["rounds_per_second"])
    for name, values in taken.items():
        print(
            f"{users:,} users of {SHORT_TEXT} tokens, {name}: ms per round", *(f"{v:.2f}" for v in values), flush=True
        )
    ratio = statistics.median(taken["with noise"]) / statistics.median(taken["without"])
    print(f"{users:,} users per round: noise makes a round {ratio:.3f} times as long (medians of {times})", flush=True)


def main() -> None:
    """Run the measurements for the device, and those of `--share`."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parameters", type=int, default=1_346_144, help="number of parameters of the model")
    options.add_argument("--device", default="cpu")
    options.add_argument(
        "--share", type=int, nargs="*", default=[], metavar="USERS", help="users per round of the whole rounds"
    )
    options.add_argument(
        "--times", type=int, default=3, help="measurements of whole rounds, each with and without noise"
    )
    given = options.parse_args()
    zeros = torch.zeros(given.parameters, dtype=torch.int64, device=given.device)
    average = BoundedAverage(units_P=zeros, unit=2.0**-20, sensitivity=1.0)
    if given.device == "cpu":
        torch.set_num_threads(1)
        _, busy = least(lambda: secure_generator().standard_normal(DRAWS), 7)
        print(f"{GENERATOR}: {DRAWS / busy / 1e3:.1f} million float64 normals per second on one core")
        for threads in (n for n in (1, 2, 4, 8, 16) if n <= (os.cpu_count() or 1)):
            pool = ThreadPoolExecutor(max_workers=threads)
            noise_module._threads = lambda pool=pool: pool  # pyright: ignore[reportAttributeAccessIssue]
            noise_module.MAX_THREADS = threads
            elapsed, busy = least(lambda: draw(average))
            print(
                f"noise of {given.parameters:,} parameters, {threads} threads: {elapsed:.1f} ms, {busy:.1f} of processor"
            )
    else:
        draw(average)
        elapsed, busy = least(lambda: draw(average))
        print(f"noise of {given.parameters:,} parameters on {given.device}: {elapsed:.2f} ms, {busy:.2f} of processor")
    for users in given.share:
        share(users, given.device, given.times)


if __name__ == "__main__":
    main()
