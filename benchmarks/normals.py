"""How fast the secure noise is: float64 normals a second on one core, and a round's noise as the mechanism adds it.

Run it: OMP_NUM_THREADS=1 python benchmarks/normals.py [--parameters 1346144]
Processor time of one thread, so that a busy machine does not count against it; the best of several.
"""

import argparse
import time

import torch

from unheard import GaussianNoise
from unheard.mechanism.values import BoundedAverage
from unheard.randomness import GENERATOR, secure_generator

REPEATS = 7
DRAWS = 10_000_000


def best(work) -> float:
    """Seconds of processor time of this thread, the least of several."""
    found = []
    for _ in range(REPEATS):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return min(found)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--parameters", type=int, default=1_346_144, help="of the model whose round is timed")
    parameters = options.parse_args().parameters
    torch.set_num_threads(1)
    drawing = best(lambda: secure_generator().standard_normal(DRAWS))
    average = BoundedAverage(units_P=torch.zeros(parameters, dtype=torch.int64), unit=2.0**-20, sensitivity=1.0)
    noise = GaussianNoise(noise_multiplier=1.0)
    adding = best(lambda: noise.add(average, secure_generator()))
    print(f"{GENERATOR}: {DRAWS / drawing / 1e6:.1f} million float64 normals a second on one core")
    print(f"a round's noise on {parameters:,} parameters, drawn, rounded and added: {1e3 * adding:.1f} ms")


if __name__ == "__main__":
    main()
