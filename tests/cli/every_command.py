"""Run every command of the command line in one process on a tiny corpus, and record how each ended.

    python every_command.py FOLDER [nodes]

With `nodes`, the script trains on the nodes of Flower's simulation, which starts processes of Flower and Ray.

FOLDER must be empty. The script writes FOLDER/ended.json, a list of [arguments, exit status, seconds]. A new command
needs a line in COMMANDS.
"""

import contextlib
import importlib
import json
import os
import random
import shlex
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from unheard.cli.main import main

ENDED = "ended.json"
USERS, WORDS = (
    150,
    ["the", "to", "you", "i", "a", "it", "and", "of", "that", "is", "are", "how", "do", "we", "this", "go"],
)
KEYBOARD_PORT = 8123
TELEMETRY_SECONDS = 12
"""Seconds for which the process runs after importing onnxruntime. Version 1.31.1 looks up its telemetry host after 9 s."""
LOOKED_UP = "telemetry.example.com"
"""A name that is looked up after the last command. If it is not in the log, queries were not logged."""

FIELDS = "--user-field who --text-field said"
SMALL = (
    "--set model.embedding_size=4 --set model.hidden_size=6 --set evaluation.max_tokens=200 --set evaluation.every=2"
)
MUCH_NOISE = "--set noise.noise_multiplier=4"  # its loss distribution is computed in a tenth of the time of z = 1
LOSS = "--allow-clip-loss 100 --allow-loss 100"
COMMANDS = [
    "base tiny --out base",
    f"prepare posts.jsonl --out store {FIELDS} --vocab words.txt --held-out 0.2 --workers 1 --shards 2",
    "init run.toml --corpus store --population 150 --users-per-round 8 --rounds 2",
    f"train run.toml --out first --set clip.norm=0.1 {SMALL} {MUCH_NOISE}",
    "export first --to onnx --out exported",
    f"keyboard exported first --no-open --port {KEYBOARD_PORT}",
    "predict exported 'how are'",
    "predict first 'how are'",
    "watch first",
    "watch live --every 0.1",
    "resume first --rounds 3 --log-file log.txt",
    *([f"train run.toml --out tracked --track mlflow {SMALL} {MUCH_NOISE}"] if find_spec("mlflow") else []),
    "card first --out card.md",
    "export first --to hub-folder --out hub",
    f"sweep run.toml --out swept --vary clip.norm=1,2 {SMALL} {MUCH_NOISE}",
    f"tune run.toml --out tuned --norms 0.1 --noise-stds 0.1 --users-per-round 8 --rounds 1 --yes {LOSS} {SMALL}",
    "evaluate first --full",
    "compare first swept/norm=1",
    "report first --out page",
    "personalize first --text mine.txt --out mine",
    "plan --users 10000 --users-per-round 100 --rounds 10 --noise-multiplier 1 --cost",
    "statement first",
    "budget store",
    "verify first --corpus store",
    "canaries store --out canaries.jsonl --users 0 --users 1",
    "audit first --candidates 100 --canaries 20 --rounds 1",
    "corpus show store",
    "corpus synth --like store --users 10 --tokens-per-user 20 --out synthetic --workers 1",
    "corpus narrow store --vocab-size 10 --out narrow",
    "corpus part store --part 1/2 --out part",
    "benchmark --device cpu --model first/run.toml --engine stacked --users 1 --rounds 0",
    f"prepare posts.jsonl --out large {FIELDS} --vocab public --vocab-size 3000 --held-out 0.2 --workers 1",
    "demo --rounds 1 --corpus large --out demo --yes",
]
NODES = [
    COMMANDS[1],
    COMMANDS[2],
    f"train run.toml --out nodes --on flower --supernodes 2 --set clip.norm=0.1 {SMALL} {MUCH_NOISE}",
]
"""A separate list, because the processes of Flower and Ray take as long as all other commands."""


def write_inputs() -> None:
    draw = random.Random(1)
    rows = [{"who": f"user{k % USERS}", "said": " ".join(draw.choices(WORDS, k=8))} for k in range(USERS * 5)]
    Path("posts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("words.txt").write_text("\n".join(WORDS) + "\n")
    Path("mine.txt").write_text("".join(row["said"] + "\n" for row in rows[:100]))
    write_tiny_model()


def write_tiny_model() -> None:
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {"n_positions": 16, "n_embd": 4, "n_layer": 1, "n_head": 1, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), **settings)).save_pretrained("tiny")
    pieces = {word: number for number, word in enumerate(WORDS)}
    Tokenizer(models.WordLevel(pieces, unk_token="the")).save("tiny/tokenizer.json")


def open_keyboard() -> None:
    """Request the page of the keyboard, as a browser does, once the server is ready."""
    for _ in range(400):
        with contextlib.suppress(OSError):
            for path in ("", "about"):
                urllib.request.urlopen(f"http://127.0.0.1:{KEYBOARD_PORT}/{path}", timeout=10).read()
            return
        time.sleep(0.05)
    print("The keyboard was not served.", flush=True)


def look_around() -> None:
    time.sleep(0.5)


WHILE_IT_SERVES: dict[str, Callable[[], None]] = {"keyboard": open_keyboard, "watch live": look_around}
"""By prefix of the command: a function that returns when the command may be ended by Ctrl-C."""


def stop_after(wait: Callable[[], None]) -> None:
    try:
        wait()
    finally:
        os.kill(os.getpid(), signal.SIGINT)


def status_of(line: str) -> int:
    """Run one command line and return its exit status."""
    for start, wait in WHILE_IT_SERVES.items():
        if line.startswith(start):
            threading.Thread(target=stop_after, args=(wait,), daemon=True).start()
    sys.argv = ["unheard", *shlex.split(line)]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_all(lines: list[str]) -> list[tuple[str, int, float]]:
    # As in every command: after unheard. Early: the commands take up the seconds before it would contact its vendor.
    importlib.import_module("onnxruntime")
    imported_at = time.monotonic()
    write_inputs()
    ended = []
    for line in lines:
        began = time.monotonic()
        if line.startswith("watch live"):  # a run without a statement is one that still trains
            shutil.copytree("first", "live")
            Path("live/statement.json").unlink()
        print(f"\n$ unheard {line}", flush=True)
        ended.append((line, status_of(line), time.monotonic() - began))
        print(f"status {ended[-1][1]} after {ended[-1][2]:.1f} s", flush=True)
    time.sleep(max(0.0, imported_at + TELEMETRY_SECONDS - time.monotonic()))
    return ended


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    Path(ENDED).write_text(json.dumps(run_all(NODES if sys.argv[2:] == ["nodes"] else COMMANDS)))
    with contextlib.suppress(OSError):
        socket.getaddrinfo(LOOKED_UP, 443)
