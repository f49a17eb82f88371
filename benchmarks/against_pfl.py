"""Compare the user updates per second of Unheard with those of Apple's pfl 0.6, in one process tree on the same CPU.

Run it: python benchmarks/against_pfl.py [--venv DIR] [--users 16] [--repeats 5] [--threads 2] [--store CORPUS] [--json]

Both sides compute one round of the paper's user update: the tied LSTM (V = 10,000, D = 96, H = 256, word vectors of
norm 1), 1,601 tokens per user in 20 local batches of 8 x 10, one epoch of SGD with learning rate 6, flat clip S = 15,
z = 1, and the server's step. Unheard clips after every local step, sums integers exactly, and draws its noise from a
secure generator. pfl clips once at the end, sums floats, and draws its noise from torch's generator.

pfl_side.py is the program of pfl's side, written with torch's fused LSTM. pfl is run in three ways: one process with
all threads, one process with one thread, and as many processes (pfl's own workers) as threads. The fastest is compared,
and all are printed. pfl's allocator is set to keep freed memory, which makes pfl up to a quarter faster
(--default-malloc keeps the default); the allocator of Unheard has its default.

First both sides compute one user's update without clip and noise from the same parameters; the updates must agree. Then
the sides take turns. If other programs use the machine, compare processor seconds per user instead of users per second.
"""

import argparse
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from statistics import median

import numpy as np
import torch

import unheard
from unheard.engines.choice import EngineChoice
from unheard.mechanism.clipping import NoClip
from unheard.mechanism.noise import NoNoise
from unheard.mechanism.plan import RoundPlan
from unheard.models.model import window_targets
from unheard.randomness import reproducible_generator, secure_generator
from unheard.updates.user_update import User, windows_of

TOKENS, CLIP_NORM, NOISE_MULTIPLIER = 1601, 15.0, 1.0
"""Tokens per user, S and z."""
SAME_UPDATE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest relative difference of the two updates that rounding can explain, by precision."""


KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""Environment variables that make glibc's allocator keep freed memory. By default it returns large tensors to the
system, which causes page faults at the next step."""


class Ours:
    """Unheard's side: it sums the updates of a cohort, averages, adds noise and takes the server's step."""

    def __init__(self, users: list[User], vocabulary_size: int, threads: int, precision: str) -> None:
        torch.set_num_threads(threads)
        self.users, self.model = users, unheard.TiedLSTM(vocabulary_size=vocabulary_size)
        self.params_P = self.model.initial(0)
        self.engine = EngineChoice(kind="auto", device="cpu", precision=precision).build(self.model)

    def plan(self, clip, noise) -> RoundPlan:
        """Return the plan of a round with this clip and noise."""
        sampling = unheard.PoissonSampling(users_per_round=len(self.users))
        parts = dict(population=10 * len(self.users), sampling=sampling, update=unheard.FedAvg())
        return unheard.Plan(**parts, clip=clip, noise=noise).at(0, self.model.layout)

    def one_delta(self) -> np.ndarray:
        """Return the update of the first user without clip and noise."""
        plan = self.plan(NoClip(), NoNoise())
        total = self.engine.sum_updates(self.params_P, self.users[:1], plan, reproducible_generator(0))
        return (total.units_P.double() * total.grid).numpy()

    def round(self, num_users: int) -> tuple[float, float]:
        """Run one round and return its seconds and processor seconds."""
        plan = self.plan(unheard.FlatClip(norm=CLIP_NORM), unheard.GaussianNoise(noise_multiplier=NOISE_MULTIPLIER))
        began, processor = time.perf_counter(), processor_seconds()
        total = self.engine.sum_updates(self.params_P, self.users[:num_users], plan, reproducible_generator(0))
        noisy = plan.noise.add(plan.average(total), secure_generator())
        self.model.project(self.params_P + noisy.average_P.to(self.params_P.dtype))
        return time.perf_counter() - began, processor_seconds() - processor


class Theirs:
    """pfl's side: worker processes in pfl's environment, which receive and send lines of JSON.

    Args:
        python: The interpreter of the environment with pfl.
        given: The file with initial parameters and users' windows.
        processes: Number of workers.
        threads: Threads per worker.
        malloc: Environment variables of the allocator.
    """

    def __init__(self, python: Path, given: Path, processes: int, threads: int, malloc: dict[str, str]) -> None:
        self.name = f"{processes} process{'es' if processes > 1 else ''} x {threads} thread{'s' if threads > 1 else ''}"
        update = unheard.FedAvg()
        asked = {
            "given": str(given),
            "threads": threads,
            "update": {
                "learning_rate": update.learning_rate,
                "batch_size": update.batch_size,
                "clip_norm": CLIP_NORM,
                "noise_multiplier": NOISE_MULTIPLIER,
            },
        }
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore", **malloc}
        if processes > 1:
            environment["PFL_WORKER_ADDRESSES"] = ",".join(f"localhost:{free_port()}" for _ in range(processes))
        command = [str(python), str(Path(__file__).with_name("pfl_side.py")), json.dumps(asked)]
        self.workers = [
            subprocess.Popen(
                command,
                env={**environment, "PFL_WORKER_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(processes)
        ]
        self.torch = {self._answer(worker)["torch"] for worker in self.workers}.pop()

    def _answer(self, worker: subprocess.Popen[str]) -> dict:
        """Return the next answer of a worker. Exit if the worker has ended."""
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            sys.exit("pfl's side ended; its error is above. Does the environment --venv have pfl 0.6 and torch?")
        return json.loads(line)

    def _ask(self, request: dict) -> list[dict]:
        """Send a request to all workers and return their answers."""
        for worker in self.workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(request) + "\n")
            worker.stdin.flush()
        return [self._answer(worker) for worker in self.workers]

    def one_delta(self, folder: Path) -> np.ndarray:
        """Return the update of the first user without clip and noise."""
        self._ask({"delta_to": str(folder / "delta.npy")})
        return np.load(folder / "delta.npy")

    def round(self, num_users: int) -> tuple[float, float]:
        """Run one round and return the seconds of the slowest worker and the processor seconds of all."""
        answers = self._ask({"users": num_users})
        return max(a["seconds"] for a in answers), sum(a["processor"] for a in answers)

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.communicate()  # a worker ends when its standard input is closed


def processor_seconds() -> float:
    """Return the processor seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def pfl_python(folder: Path | None) -> Path:
    """Return the interpreter of an environment with pfl. Create the environment if it does not exist.

    Args:
        folder: The environment; None for a folder in the user's cache.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = folder or cache / "unheard" / "pfl-0.6"
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder}: pfl 0.6.0 and torch", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True)
        wanted = ["pfl==0.6.0", f"torch=={torch.__version__.split('+')[0]}", f"numpy=={np.__version__}", "setuptools"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
    return python


def users_of(store: Path | None, count: int) -> tuple[list[User], int]:
    """Return users of 1,601 tokens each, and the size of their vocabulary.

    Args:
        store: A token store; None for synthetic users, whose words follow Zipf's law with a fixed seed.
        count: The number of users.
    """
    if store is None:
        V, rng = 10_000, np.random.default_rng(0)
        share_V = 1 / np.arange(1, V + 1)
        return [User(rng.choice(V, size=TOKENS, p=share_V / share_V.sum())) for _ in range(count)], V
    corpus = unheard.TokenStore.open(store)
    users: list[User] = []
    for at in range(0, corpus.train.num_users, 1000):
        numbers = np.arange(at, min(at + 1000, corpus.train.num_users))
        users += [User(np.asarray(t[:TOKENS])) for t in corpus.train.users(numbers) if len(t) >= TOKENS]
        if len(users) >= count:
            return users[:count], len(corpus.vocabulary)
    sys.exit(f"{store} has {len(users)} users of {TOKENS} tokens, but --users asks for {count}. Lower --users.")


def fastest(
    python: Path, given: Path, ways: list[tuple[int, int]], tries: int, malloc: dict[str, str]
) -> tuple[Theirs, dict[str, float]]:
    """Return pfl's side run in the fastest way on this machine, and the seconds per user of every way.

    Args:
        python: The interpreter of the environment with pfl.
        given: The file with initial parameters and users' windows.
        ways: Numbers of processes and of threads per process.
        tries: Rounds of each way; the fastest round counts.
        malloc: Environment variables of the allocator.
    """
    found: dict[str, float] = {}
    best: Theirs | None = None
    for processes, each in dict.fromkeys(ways):
        side = Theirs(python, given, processes, each, malloc)
        side.round(2 * processes)
        found[side.name] = min(side.round(2 * processes)[0] / (2 * processes) for _ in range(tries))
        print(f"pfl with {side.name}: {1 / found[side.name]:.2f} users/s", file=sys.stderr, flush=True)
        if best is None or found[side.name] < found[best.name]:
            best, side = side, best
        if side is not None:
            side.close()
    assert best is not None
    return best, found


def figures(rounds: list[tuple[float, float]], num_users: int) -> dict[str, float]:
    """Return medians and best values of some rounds, each given by its seconds and processor seconds."""
    seconds, processor = zip(*rounds, strict=True)
    return {
        "users_per_second_median": num_users / median(seconds),
        "users_per_second_best": num_users / min(seconds),
        "processor_seconds_per_user_median": median(processor) / num_users,
        "processor_seconds_per_user_best": min(processor) / num_users,
    }


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--venv", type=Path, help="an environment with pfl 0.6; default: one is created in the cache")
    words.add_argument("--users", type=int, default=16, help="users per round")
    words.add_argument("--repeats", type=int, default=5, help="rounds of each side")
    words.add_argument(
        "--tries", type=int, default=2, help="rounds of each way to run pfl, from which the fastest way is chosen"
    )
    words.add_argument("--pfl-as", metavar="PxT", help="run pfl only with P processes of T threads each, such as 2x1")
    words.add_argument("--default-malloc", action="store_true", help="run pfl with the default allocator settings")
    words.add_argument("--threads", type=int, default=2, help="threads of each side")
    words.add_argument(
        "--precision", choices=list(SAME_UPDATE), default="float32", help="precision of Unheard; pfl has float32"
    )
    words.add_argument("--store", type=Path, help="a token store whose users are used instead of synthetic ones")
    words.add_argument("--json", action="store_true", help="print one JSON object")
    asked = words.parse_args()
    ways = [(1, 1), (1, asked.threads), (asked.threads, 1)]
    if asked.pfl_as:
        processes, _, threads = asked.pfl_as.partition("x")
        ways = [(int(processes), int(threads))]
    python = pfl_python(asked.venv)
    users, vocabulary_size = users_of(asked.store, asked.users)
    ours = Ours(users, vocabulary_size, asked.threads, asked.precision)
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "given.npz"
        windows_UKW = np.stack([windows_of(user.tokens, unheard.FedAvg().unroll) for user in users])
        inputs_UKT, targets_UKT, counts_UKT = window_targets(torch.from_numpy(windows_UKW))
        layers = {name: layer.numpy() for name, layer in ours.model.layout.split(ours.params_P).items()}
        targets_UKT = torch.where(counts_UKT, targets_UKT, -1)
        np.savez(given, inputs_UKT=inputs_UKT.numpy(), targets_UKT=targets_UKT.numpy(), **layers)
        theirs, tried = fastest(python, given, ways, asked.tries, {} if asked.default_malloc else KEEP_MEMORY)
        one = ours.one_delta()
        difference = float(np.linalg.norm(one - theirs.one_delta(Path(folder))) / np.linalg.norm(one))
        if not difference < SAME_UPDATE[asked.precision]:
            sys.exit(
                f"The two sides compute different updates: relative difference {difference:.1e}. No speed is compared."
            )
        ours.round(asked.users), theirs.round(asked.users)  # warm
        rounds = [(ours.round(asked.users), theirs.round(asked.users)) for _ in range(asked.repeats)]
        theirs.close()
    mine, other = (figures([pair[side] for pair in rounds], asked.users) for side in (0, 1))
    found = {
        "same_update_relative_difference": difference,
        "users_a_round": asked.users,
        "rounds": asked.repeats,
        "threads": asked.threads,
        "precision": asked.precision,
        "unheard": mine,
        "pfl": {
            **other,
            "run_as": theirs.name,
            "default_malloc": asked.default_malloc,
            "users_per_second_tried": {way: 1 / seconds for way, seconds in tried.items()},
        },
        "ratio_of_median_users_per_second": mine["users_per_second_median"] / other["users_per_second_median"],
        "ratio_of_median_processor_seconds": other["processor_seconds_per_user_median"]
        / mine["processor_seconds_per_user_median"],
        "versions": {"torch": torch.__version__, "torch of pfl": theirs.torch, "pfl": "0.6.0"},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg()[0],
    }
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    print(f"one user's update, unclipped: relative difference {difference:.1e} (the same work)")
    print(f"{'':9}{'users/s median':>16}{'best':>8}{'processor s/user median':>26}{'best':>8}")
    for name, row in (("unheard", mine), ("pfl", other)):
        a, b, c, d = row.values()
        print(f"{name:9}{a:16.2f}{b:8.2f}{c:26.3f}{d:8.3f}")
    print(f"pfl as {theirs.name}, its fastest here; load average {found['load_average']:.1f}")
    print(f"ratio of users/s {found['ratio_of_median_users_per_second']:.2f}")
    print(f"ratio of processor seconds {found['ratio_of_median_processor_seconds']:.2f}")


if __name__ == "__main__":
    main()
