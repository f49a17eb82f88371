"""How far would users move a trained model if nothing were clipped, and how much of that is the word table's share?

Run it: python benchmarks/update_norms.py RUN [RUN ...] --corpus STORE [--users 60]
One local update of each run's own recipe, from its newest checkpoint, by users who were held out. What people's updates are like is
private: for corpora that are public.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import unheard
from unheard.engines.reference import ReferenceEngine
from unheard.run_folder import RunFolder
from unheard.training.checkpoint import newest_checkpoint
from unheard.training.run import read_saved_run
from unheard.updates.user_update import User


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    words.add_argument("runs", nargs="+", type=Path)
    words.add_argument("--corpus", required=True)
    words.add_argument("--users", type=int, default=60)
    asked = words.parse_args()
    store = unheard.TokenStore.open(asked.corpus)
    held_out = store.held_out.users(np.arange(min(asked.users, store.held_out.num_users)))
    print(f"torch {torch.__version__}, {len(held_out)} held-out users of {asked.corpus}", flush=True)
    for path in asked.runs:
        folder = RunFolder(path)
        run, _ = read_saved_run(folder.run_file)
        saved = newest_checkpoint(folder).state
        plan = replace(run.plan, clip=unheard.NoClip(), noise=unheard.NoNoise()).at(saved.round, run.model.layout)
        engine = ReferenceEngine(run.model)
        whole, table = [], []
        for tokens in held_out:
            delta_P = engine.user_update(saved.params_P, User(tokens=tokens), plan, seed=1)
            whole.append(float(delta_P.norm()))
            table.append(float(run.model.layout.split(delta_P)["embedding"].norm()))
        length = float(run.model.layout.split(saved.params_P)["embedding"].norm(dim=1).median())
        low, middle, high = np.quantile(whole, [0.1, 0.5, 0.9])
        print(
            f"{path.parent.name}/{path.name}, round {saved.round:,}: norm of an update {middle:.1f} in the middle ({low:.1f} to "
            f"{high:.1f} for eight in ten), of the word table alone {np.median(table):.1f}; a word vector is {length:.2f} long",
            flush=True,
        )


if __name__ == "__main__":
    main()
