"""Two small real runs for the pages' tests: one without privacy, one with, trained in a second or two, and measured."""

from dataclasses import replace
from pathlib import Path

import unheard
from unheard.cli.measuring import measured

ROUNDS = 12


def make_runs(run: unheard.Run, out: Path) -> list[Path]:
    """`plain` and `private` in a folder, evaluated every other round."""
    plain = replace(
        run.plan,
        sampling=unheard.FixedSizeSampling(users_per_round=6),
        clip=unheard.NoClip(),
        estimator=unheard.TrueAverage(),
        noise=unheard.NoNoise(),
    )
    made = []
    for name, plan in (("plain", plain), ("private", run.plan)):
        mine = replace(
            run,
            plan=plan,
            training=unheard.Training(rounds=ROUNDS, checkpoint_every=6),
            evaluation=unheard.Evaluation(every=2, max_tokens=400, unroll=20),
        )
        for _ in unheard.train(mine, out / name):
            pass
        measured(out / name, prompts=["w1 w2", "w7"])
        made.append(out / name)
    return made
