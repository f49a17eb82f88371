"""Measure the time per round of a federated run on simulated nodes: local training, masking and transport.

    python benchmarks/flower.py --nodes 200 --rounds 20

The script trains one small model three times with the same seed: by `unheard train` in its own process, on Flower's
simulated nodes in central mode, and on these nodes with secure aggregation. The three alternate round by round, and
their models are compared by hash. Local training and masking are measured in processor seconds, summed over all nodes
(each simulated node appends its times to a file) and the server; for plain training, over its process. Transport is the
rest of the wall time per round: Flower's queues, Ray, serialisation and waiting. Start is the time until all nodes are
registered. The first round of each run is left out.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

import unheard
from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.engines.choice import EngineChoice
from unheard.federated import secure_aggregation
from unheard.federated.flower import _Partition, node_app, simulated_nodes
from unheard.federated.node import Node
from unheard.federated.server import FederatedEngine
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import newest_checkpoint
from unheard.training.loop import train

MODES = ("central", "secure")
"""The two modes of a federated run: central, and with secure aggregation."""


class TimedData:
    """A function from a Flower context to the data of a node, which also makes the process record its times.

    The first call in a process patches `Node`, so that its methods append their processor seconds to a file.

    Args:
        data_of: The function that returns the data of a node.
        folder: Folder for the files with the times.
    """

    def __init__(self, data_of, folder: Path) -> None:
        self.data_of, self.folder = data_of, folder

    def __call__(self, context):
        if not hasattr(Node, "timed"):
            Node.timed = True  # pyright: ignore[reportAttributeAccessIssue]
            file = self.folder / f"{os.getpid()}.jsonl"
            for name in ("_updates", "_aggregate"):
                setattr(Node, name, self._timed(getattr(Node, name), name, file))
        return self.data_of(context)

    @staticmethod
    def _timed(function, name: str, file: Path):
        """Return a method of `Node` that also appends its processor seconds to a file."""

        def timed(node, request):
            began = time.process_time()
            try:
                return function(node, request)
            finally:
                mode = "central" if request.kind == "update" else "secure"
                seconds = time.process_time() - began
                with open(file, "a") as out:
                    out.write(json.dumps({"mode": mode, "what": name, "seconds": seconds}) + "\n")

        return timed


def synthetic(path: Path, users: int, words: int, tokens: int) -> None:
    """Write a store of synthetic users, whose words follow Zipf's law.

    Args:
        path: Folder of the store.
        users: Number of users.
        words: Size of the vocabulary.
        tokens: Tokens per user.
    """
    rng = np.random.default_rng(1)

    def user():
        text = rng.zipf(1.3, size=tokens) % words + 3
        return np.concatenate([[0], text, [1]])

    vocabulary = Vocabulary.of([f"w{i}" for i in range(words)])
    info = {"tokens": {"kind": "words"}, "vocabulary": {"kind": "file", "source": "numbers"}}
    write_store(
        path,
        train=[user() for _ in range(users)],
        held_out=[user() for _ in range(5)],
        vocabulary=vocabulary,
        info=info,
    )


def model_hash(out: Path) -> str:
    """Return a hash of the parameters in the newest checkpoint of a run."""
    params = newest_checkpoint(RunFolder.open(out)).state.params_P
    return hashlib.sha256(params.numpy().tobytes()).hexdigest()[:16]


def timed_total(seconds: list[float]) -> None:
    """Patch secure aggregation so that each sum of the server appends its processor seconds to `seconds`."""
    before = secure_aggregation.Session.total

    def timed(session):
        began = time.process_time()
        result = before(session)
        seconds.append(time.process_time() - began)
        return result

    secure_aggregation.Session.total = timed


def plain_rounds(connection, run, out: Path) -> None:
    """Train a run without Flower, in a child process.

    For each true message train one round, and answer with its wall and processor seconds. For a false message end, and
    answer with the hash of the model.

    Args:
        connection: The child's end of a pipe.
        run: The run.
        out: The run folder.
    """
    torch.set_num_threads(1)
    reports = train(run, out, engine=EngineChoice(device="cpu"))
    while connection.recv():
        connection.send(timed_round(reports))
    reports.close()
    connection.send(model_hash(out))


def timed_round(reports) -> tuple[float, float]:
    """Train the next round and return its wall and processor seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    next(reports)
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Train the three runs and print their times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--users-per-round", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=1600)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="unheard-flower-") as folder:
        base = Path(folder)
        synthetic(base / "store", args.nodes, 2000, args.tokens)
        run = unheard.Run(
            corpus=base / "store",
            model=unheard.TiedLSTM(vocabulary_size=2003, embedding_size=32, hidden_size=64),
            plan=unheard.Plan(
                population=args.nodes,
                sampling=unheard.PoissonSampling(users_per_round=args.users_per_round),
                update=unheard.FedAvg(),
                clip=unheard.FlatClip(norm=5.0),
                noise=unheard.GaussianNoise(noise_multiplier=1.0),
            ),
            training=unheard.Training(rounds=args.rounds, reproducible_seed=1, checkpoint_every=args.rounds),
            evaluation=unheard.Evaluation(every=args.rounds, max_tokens=1000),
        )
        print(f"{args.nodes} nodes, {args.users_per_round:g} users per round, {run.model.layout.total:,} parameters,")
        print(f"{args.rounds} rounds, {os.cpu_count()} cores")
        here, there = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=plain_rounds, args=(there, run, base / "plain"))
        process.start()
        times, unmasking = base / "times", []
        times.mkdir()
        timed_total(unmasking)
        data_of = TimedData(_Partition((base / "store").resolve(), 1), times)
        began = time.perf_counter()
        with simulated_nodes(base / "store", args.nodes, app=node_app(data_of)) as network:
            store = unheard.TokenStore.open(base / "store")
            reports = {}
            for mode in MODES:
                choice = EngineChoice(device="cpu", secure_aggregation=mode == "secure")
                engine = FederatedEngine(network, run.model, choice, store)
                reports[mode] = train(run, base / mode, engine=choice, on=engine)
            print(f"start of the simulation and registration: {time.perf_counter() - began:.1f} s", flush=True)
            seconds = {mode: [] for mode in ("plain", *MODES)}
            for number in range(args.rounds):
                here.send(True)
                seconds["plain"].append(here.recv())
                for mode in MODES:
                    seconds[mode].append(timed_round(reports[mode]))
                if number == 0:  # leave out the first round, which builds engines and opens files
                    for file in times.iterdir():
                        file.unlink()
            for mode in MODES:
                reports[mode].close()
            here.send(False)
            hashes = {"plain": here.recv(), **{mode: model_hash(base / mode) for mode in MODES}}
            process.join()
        lines = [json.loads(line) for file in times.iterdir() for line in file.read_text().splitlines()]
        means = {mode: np.mean(seconds[mode][1:], axis=0) for mode in seconds}
        plain_wall, plain_cpu = means["plain"]
        print(f"plain: {plain_wall:.3f} s per round, {plain_cpu:.3f} s of processor; model {hashes['plain']}")
        for mode in MODES:
            total, server = means[mode]
            of = {
                what: sum(x["seconds"] for x in lines if (x["mode"], x["what"]) == (mode, what)) / (args.rounds - 1)
                for what in ("_updates", "_aggregate")
            }
            local, masking = of["_updates"], 0.0
            if mode == "secure":
                masking = of["_aggregate"] - local + sum(unmasking[1:]) / (args.rounds - 1)
            work = local + masking
            print(
                f"{mode}: {total:.3f} s per round; processor seconds: local training {local:.3f}, masking "
                f"{masking:.3f}, together {work / plain_cpu:.2f} times plain; transport {total - work / 2:.3f} s "
                f"(wall time beyond the work on two cores; server {server:.3f} s of processor); model {hashes[mode]}"
            )


if __name__ == "__main__":
    main()
