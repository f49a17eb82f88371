"""Measure the norms of users' updates without a clip, from the newest checkpoint of a run: in all and of the embedding.

Run it: python benchmarks/update_norms.py RUN [RUN ...] --corpus STORE [--users 60]

The script computes the update of each run's own plan for held-out users. The norms are private, because they depend on
the texts of users: use this only for public corpora.
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
    """Print the quantiles of the norms for each run."""
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
