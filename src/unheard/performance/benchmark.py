"""How fast this machine trains: user updates a second by engine and chunk, whole rounds end to end, and what the machine allows.

In: a model and engines. Out: plain figures. Users are synthetic (Zipf's law over the vocabulary), so no corpus is needed; rounds
are real ones, with secure noise, a ledger on disk, sampling and reading, from a store made for the purpose.
"""

import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import BOS, Vocabulary
from unheard.devices import finish
from unheard.engines.choice import EngineChoice
from unheard.engines.engine import Engine
from unheard.evaluation.next_word import Evaluation
from unheard.mechanism.clipping import FlatClip
from unheard.mechanism.noise import GaussianNoise
from unheard.mechanism.plan import Plan
from unheard.mechanism.sampling import PoissonSampling
from unheard.models.model import LanguageModel
from unheard.randomness import reproducible_generator
from unheard.training.loop import train_together
from unheard.training.run import Run, Training
from unheard.updates.fedavg import FedAvg
from unheard.updates.users import User


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the machine allows, measured: bytes a second through memory, and operations a second in a large product."""

    device: str
    bytes_per_second: float
    float32_per_second: float
    bfloat16_per_second: float


def machine(device: torch.device) -> Machine:
    """Two ceilings, in about a second."""
    size = 4096 if device.type == "cuda" else 1024
    source = torch.empty(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    copied = _seconds(lambda: target.copy_(source), device)
    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(size, size, device=device).to(dtype)
        rates.append(2 * size**3 / _seconds(lambda a=a: a @ a, device))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    return Machine(
        device=name,
        bytes_per_second=2 * source.nbytes / copied,
        float32_per_second=rates[0],
        bfloat16_per_second=rates[1],
    )


def user_updates(
    model: LanguageModel, choice: EngineChoice, num_users: int, *, tokens: int = 1600, seconds: float = 3.0
) -> dict[str, Any]:
    """The paper's user update (B = 8, unroll 10, one epoch, clipped after every step) of so many users at a time."""
    engine, plan = choice.build(model), _plan(num_users).at(0, model.layout)
    users = list(_synthetic_users(model.vocabulary_size, num_users, tokens))
    params_P = model.initial(0).to(engine.device)
    _forget_peak(engine.device)

    def update() -> None:
        engine.sum_updates(params_P, users, plan, reproducible_generator(0)).units_P.cpu()

    update()  # compiles, and fills caches
    each = _seconds(update, engine.device, seconds)
    return {
        "engine": type(engine).__name__,
        "precision": choice.precision,
        "users": num_users,
        "users_per_second": num_users / each,
        "tokens_per_second": num_users * tokens / each,
        "bytes_per_number": 2 if _is_coarse(choice) else 4,
        "peak_memory_bytes": _peak(engine),
    }


def limits(model: LanguageModel, found: Machine, bytes_per_number: int = 4, *, tokens: int = 1600) -> dict[str, float]:
    """Users a second if only memory, or only arithmetic, counted: at every local step each parameter is read twice and written
    once, and takes part in three products with each of 80 places (the embedding in the output layer, the rest once)."""
    steps, places = tokens / 80, 80
    moved = 3 * model.layout.total * bytes_per_number * steps
    operations = 6 * model.layout.total * places * steps
    rate = found.bfloat16_per_second if bytes_per_number == 2 else found.float32_per_second
    return {"memory": found.bytes_per_second / moved, "arithmetic": rate / operations}


def whole_rounds(
    model: LanguageModel,
    choice: EngineChoice,
    users_per_round: int,
    *,
    runs: int = 1,
    rounds: int = 20,
    tokens: int = 1600,
    population: int = 4000,
) -> dict[str, Any]:
    """Users a second of training itself: rounds of one or several runs, with everything that a round does but evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(
            Path(folder) / "store",
            train=[user.tokens for user in _synthetic_users(model.vocabulary_size, population, tokens)],
            held_out=[user.tokens for user in _synthetic_users(model.vocabulary_size, 2, 200)],
            vocabulary=Vocabulary.of([f"w{k}" for k in range(model.vocabulary_size - 3)]),
            info={
                "tokens": {"kind": "words"},
                "vocabulary": {"kind": "file", "source": "synthetic"},
                "synthetic": True,
            },
        )
        warm_up = 3
        run = Run(
            corpus=store.path,
            model=model,
            plan=_plan(users_per_round, population),
            training=Training(rounds=rounds + warm_up, checkpoint_every=10**6),
            evaluation=Evaluation(every=10**6, max_tokens=200),
        )
        going = train_together([(run, Path(folder) / f"run-{k}") for k in range(runs)], engine=choice)
        began, ended = 0.0, 0.0
        device = choice.torch_device()
        for _, report in going:
            # the last round evaluates and saves, which is not what is measured
            if report.round == warm_up:
                began = _now(device)
            if report.round == rounds + warm_up - 1:
                ended = _now(device)
        done = rounds - 1
    return {
        "users_per_round": users_per_round,
        "runs_at_once": runs,
        "users_per_second": done * users_per_round * runs / (ended - began),
        "rounds_per_second": done * runs / (ended - began),
    }


def _is_coarse(choice: EngineChoice) -> bool:
    return choice.precision == "bfloat16" or (choice.precision == "auto" and choice.torch_device().type == "cuda")


def _plan(users_per_round: int, population: int | None = None) -> Plan:
    return Plan(
        population=population or 10 * users_per_round,
        sampling=PoissonSampling(users_per_round=users_per_round),
        update=FedAvg(),
        clip=FlatClip(norm=15.0),
        noise=GaussianNoise(noise_multiplier=1.0),
    )


def _synthetic_users(vocabulary_size: int, count: int, tokens: int) -> Iterator[User]:
    """Words by Zipf's law. The first token is BOS, so that there are exactly `tokens` targets."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, vocabulary_size - 2)
    edges = np.cumsum(share / share.sum())
    for number in range(count):
        words = 3 + np.searchsorted(edges, rng.random(tokens)).clip(max=vocabulary_size - 4)
        yield User(np.concatenate([[BOS], words]), None, number)


def _seconds(work: Any, device: torch.device, at_least: float = 0.3) -> float:
    """Median seconds of a call: as many as fill `at_least`, three or more."""
    work()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < at_least:
        began = _now(device)
        work()
        taken.append(_now(device) - began)
    return float(np.median(taken))


def _now(device: torch.device) -> float:
    finish(device)
    return time.perf_counter()


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(engine: Engine) -> int:
    if engine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(engine.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def choices(choice: EngineChoice, kinds: Sequence[str], precisions: Sequence[str]) -> Iterator[EngineChoice]:
    """The engines to compare: each kind, and where it has them each precision."""
    for kind in kinds:
        for precision in precisions if kind in ("auto", "stacked") else ("auto",):
            yield replace(choice, kind=kind, precision=precision)
