"""How fast the secure noise is: float64 normals a second on one core, and a round's noise as the mechanism adds it, both the
float64 normals of `gaussian` and the integers of `exact_gaussian`, on one core and on several threads.

Run it: OMP_NUM_THREADS=1 python benchmarks/normals.py [--parameters 1346144] [--device cuda]
Processor time of one thread, so that a busy machine does not count against it; the best of several. With a GPU also how long the
training thread is busy with handing a round's noise over, in two ways: the mean, since it is the slow ones that hurt.
"""

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from unheard import ExactGaussianNoise, GaussianNoise
from unheard.mechanism import noise as noise_module
from unheard.mechanism.aggregation import BoundedAverage
from unheard.mechanism.noise import NormalsAhead, standard_normals
from unheard.parameters import finish
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


def adding(noise: GaussianNoise, average: BoundedAverage, threads: int) -> tuple[float, float]:
    """Milliseconds until a round's noise is drawn on so many threads, rounded and added, and the processor time of all threads
    for it; the least of several each."""
    pool = ThreadPoolExecutor(max_workers=threads)
    noise_module._threads = lambda: pool  # pyright: ignore[reportAttributeAccessIssue]
    elapsed, busy = [], []
    for _ in range(5 * REPEATS):
        began, used = time.perf_counter(), time.process_time()
        noise.add(average, noise.ahead(secure_generator(), average.units_P.numel(), torch.device("cpu")))
        elapsed.append(time.perf_counter() - began)
        busy.append(time.process_time() - used)
    return 1e3 * min(elapsed), 1e3 * min(busy)


def handing_over(parameters: int, device: torch.device) -> tuple[float, float]:
    """Mean milliseconds until a round's normals are on their way to the device: drawn ahead to where it fetches them; and from
    an array of numpy's, copied there by torch with as many threads as it has."""
    ahead, copied = [], []
    for _ in range(30):
        normals = NormalsAhead(secure_generator(), parameters, device)
        array = secure_generator().standard_normal(parameters)
        finish(device)
        began = time.perf_counter()
        standard_normals(normals, parameters, device)
        ahead.append(time.perf_counter() - began)
        finish(device)
        began = time.perf_counter()
        torch.from_numpy(array).pin_memory().to(device, non_blocking=True)
        copied.append(time.perf_counter() - began)
    return 1e3 * statistics.mean(ahead[1:]), 1e3 * statistics.mean(copied[1:])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--parameters", type=int, default=1_346_144, help="of the model whose round is timed")
    options.add_argument("--device", default="cpu", help="cuda: time the hand-over to it, too")
    chosen = options.parse_args()
    parameters, device = chosen.parameters, torch.device(chosen.device)
    if device.type == "cuda":
        ahead, copied = handing_over(parameters, device)
        threads = torch.get_num_threads()
        print(f"handed to {device}: {ahead:.2f} ms drawn ahead, {copied:.2f} ms copied by torch's {threads} threads")
    torch.set_num_threads(1)
    cores = os.cpu_count() or 1
    drawing = best(lambda: secure_generator().standard_normal(DRAWS))
    average = BoundedAverage(units_P=torch.zeros(parameters, dtype=torch.int64), unit=2.0**-20, sensitivity=1.0)
    print(f"{GENERATOR}: {DRAWS / drawing / 1e6:.1f} million float64 normals a second on one core")
    print(f"noise of {parameters:,} parameters, drawn, rounded and added: elapsed ms (processor ms of all threads)")
    for noise in (GaussianNoise(noise_multiplier=1.0), ExactGaussianNoise(noise_multiplier=1.0)):
        for threads in (n for n in (1, 2, 4, 8, 16) if n <= cores):
            elapsed, busy = adding(noise, average, threads)
            print(f"    {type(noise).__name__:<18} {threads:>2} threads: {elapsed:6.1f} ({busy:.1f})")


if __name__ == "__main__":
    main()
