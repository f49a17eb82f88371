"""Write the speeds that `unheard plan --cost` uses, from the dated results in benchmarks/results.

Run it after a new result: python benchmarks/speeds.py

The script reads each number from a file of results and writes src/unheard/performance/speeds.toml, so that no number is
copied by hand; a test checks that both agree. To use a newer result, replace its entry in `READ`.
"""

import re
from pathlib import Path
from typing import Any

import tomli_w

HERE = Path(__file__).parent
OUT = HERE.parent / "src" / "unheard" / "performance" / "speeds.toml"
PAPERS = {"model": "the paper's LSTM", "parameters": 1_346_144, "tokens_per_user": 1600}
H200 = {"device": "NVIDIA H200", "is_gpu": True, "source": "results/2026-11-17-h200-speed.md"}
CPU = {"device": "2 CPU cores", "is_gpu": False, "source": "results/2026-11-15-cpu-against-pfl.md"}

READ: list[tuple[dict[str, Any], str]] = [
    (
        {**H200, "engine": "stacked, bfloat16", "users_per_round": 100, "of": "whole rounds"},
        r"^\| whole rounds, 100 users per round \| ([\d,.]+) \|$",
    ),
    (
        {**H200, "engine": "stacked, bfloat16", "users_per_round": 1250, "of": "whole rounds"},
        r"^\| whole rounds, 1,250 users per round \| ([\d,.]+) \|$",
    ),
    (
        {**H200, "engine": "vectorised, bfloat16", "users_per_round": 512, "of": "updates"},
        r"^\| updates alone, vectorised, 512 users \| ([\d,.]+) \|$",
    ),
    (
        {**CPU, "engine": "stacked, float32", "users_per_round": 12, "of": "updates, clip, noise"},
        r"^\| as it comes \| ([\d,.]+) ",
    ),
]
"""What each speed describes, and a regular expression that matches one line of its source; the group is the number."""


def speeds() -> list[dict[str, Any]]:
    """Return the entries of speeds.toml."""
    found = []
    for what, pattern in READ:
        lines = (HERE / what["source"]).read_text().splitlines()
        (figure,) = [match.group(1) for line in lines if (match := re.match(pattern, line))]
        found.append({**what, **PAPERS, "users_per_second": float(figure.replace(",", ""))})
    return found


def text() -> str:
    """Return the text of speeds.toml."""
    about = "# Made by benchmarks/speeds.py from the results that each entry names. Do not edit.\n\n"
    return about + tomli_w.dumps({"speed": [{**row, "source": f"benchmarks/{row['source']}"} for row in speeds()]})


if __name__ == "__main__":
    OUT.write_text(text())
    print(OUT)
