"""The last lines of `train` and `resume`: where the run stands, and what to do next."""

from pathlib import Path
from typing import TYPE_CHECKING

from unheard.cli.display import epsilon_text, say

if TYPE_CHECKING:
    from unheard.training.loop import RoundReport


def finish(folder: Path, last: "RoundReport | None") -> None:
    from unheard.runs import RunFolder

    if last is None:
        say(f"{folder} is complete: nothing left to do. To train longer: unheard resume {folder} --rounds N")
        return
    rows = RunFolder.open(folder).read_metrics()
    if rows:
        row = rows[-1]
        say(
            f"Held-out AccuracyTop1 {100 * row['accuracy_top1']:.2f} % (top 3: {100 * row['accuracy_top3']:.2f} %), "
            f"perplexity {row['perplexity']:.4g}, after round {row['round']}."
        )
    say(f"Spent so far: ε = {epsilon_text(last.epsilon)} at δ = {last.delta:.2e}.")
    if last.stopped:
        say(f"Stopped: {last.stopped}")
    elif last.round < last.rounds:
        say(f"Stopped after round {last.round} of {last.rounds}. Continue with: unheard resume {folder}")
    say(f"Run folder: {folder}. What it guarantees: unheard statement {folder}")
