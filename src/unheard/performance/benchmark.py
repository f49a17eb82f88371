"""Measures how fast this machine trains: user updates per second by engine, whole rounds, and the machine's limits.

    run_benchmark(model, EngineChoice(), Settings())                   # everything that `unheard benchmark` measures
    user_updates(model, EngineChoice(), 100)["users_per_second"]       # the updates alone
    whole_rounds(model, EngineChoice(), 100)["users_per_second"]       # training, with noise and a ledger on disk
    limits(model, machine(device))                                     # what memory and arithmetic would allow

Input: a model and a choice of engine. Output: plain figures, as `unheard benchmark` prints them. Users are synthetic
(words by Zipf's law), so no corpus is needed. Rounds are real: secure noise, a ledger on disk, sampling and reading
from a temporary store.
"""

import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import BOS, Vocabulary
from unheard.engines.choice import EngineChoice
from unheard.engines.engine import Engine
from unheard.evaluation.next_word import Evaluation
from unheard.mechanism.clipping import FlatClip
from unheard.mechanism.noise import GaussianNoise, Noise, NoNoise
from unheard.mechanism.plan import Plan
from unheard.mechanism.sampling import PoissonSampling
from unheard.models.model import LanguageModel
from unheard.parameters import finish
from unheard.randomness import reproducible_generator
from unheard.training.loop import train_together
from unheard.training.run import Run, Training
from unheard.updates.user_update import FedAvg, User

LONG_TEXT, SHORT_TEXT = 1600, 80
"""Tokens of a user: the paper's, and one local step."""
USERS_OF_RUNS = 100
"""Users per round where several runs are timed side by side."""
EVALUATION = Evaluation()
"""The evaluations of a training run by default, which are the paper's."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Measured limits of a machine.

    Attributes:
        device: The name of the device.
        bytes_per_second: Memory bandwidth, from copying a large array.
        float32_per_second: Floating-point operations per second in a large matrix product.
        bfloat16_per_second: The same in bfloat16.
    """

    device: str
    bytes_per_second: float
    float32_per_second: float
    bfloat16_per_second: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a benchmark measures. None stands for a default that depends on the device.

    Args:
        engines: The engines that compute user updates.
        precisions: Their precisions; None for both on a GPU and float32 on a CPU.
        users: Numbers of users that the engine gets at a time; None for 100 and 1,024 on a GPU, 4 on a CPU.
        rounds: Users per round of whole rounds with long texts, 0 for none; None for 100 and 1,250 on a GPU, 4 on a CPU.
        short: The same with texts of one local step; None for 1,000 and 5,000 on a GPU, none on a CPU.
        runs: How many runs to train side by side, 0 for none; None for 16 on a GPU, none on a CPU.
        noise: The noise of whole rounds.
    """

    engines: Sequence[str] = ("stacked", "vectorised")
    precisions: Sequence[str] | None = None
    users: Sequence[int] | None = None
    rounds: Sequence[int] | None = None
    short: Sequence[int] | None = None
    runs: int | None = None
    noise: Noise = GaussianNoise(noise_multiplier=1.0)

    def for_device(self, device: torch.device) -> "Settings":
        """Return these settings with the defaults of a device filled in."""
        on_gpu = device.type == "cuda"
        return replace(
            self,
            precisions=self.precisions or (("bfloat16", "float32") if on_gpu else ("float32",)),
            users=self.users or ((100, 1024) if on_gpu else (4,)),
            rounds=self.rounds or ((100, 1250) if on_gpu else (4,)),
            short=self.short or ((1000, 5000) if on_gpu else ()),
            runs=(16 if on_gpu else 0) if self.runs is None else self.runs,
        )


def run_benchmark(
    model: LanguageModel,
    choice: EngineChoice,
    settings: Settings = Settings(),
    *,
    begin: Callable[[str], None] = lambda title: None,
    report: Callable[[str, dict[str, Any]], None] = lambda title, row: None,
) -> dict[str, Any]:
    """Measure the machine's limits, user updates with each engine, and whole rounds.

    Args:
        model: The model to train.
        choice: The device; the engine and the precision are those of the settings.
        settings: What to measure.
        begin: Called with the title of each measurement before it starts.
        report: Called with the title and the figures of each measurement of speed when it ends.

    Returns:
        A record for JSON: `machine`, `parameters`, and the rows of `updates` (`user_updates`, with the shares of the
        limits) and of `rounds` (`whole_rounds`).
    """
    device = choice.torch_device()
    settings = settings.for_device(device)
    begin("the machine's own limits")
    measured = machine(device)
    updates, rounds = [], []
    for each in _choices(choice, settings.engines, settings.precisions or ()):
        for users in settings.users or ():
            title = f"{each.kind}, {each.precision}, {users} users at a time"
            begin(title)
            row = user_updates(model, each, users)
            for name, limit in limits(model, measured, row["bytes_per_number"]).items():
                row[f"share_of_{name}_limit"] = row["users_per_second"] / limit
            updates.append(row)
            report(title, row)
    whole = [(n, LONG_TEXT, 1) for n in settings.rounds or () if n]
    whole += [(n, SHORT_TEXT, 1) for n in settings.short or () if n]
    whole += [(USERS_OF_RUNS, LONG_TEXT, settings.runs)] if settings.runs else []
    for users, tokens, runs in whole:
        title = f"whole rounds of {users} users of {tokens} tokens, {runs} run(s)"
        begin(title)
        number = _rounds_of_few_seconds(device, users, tokens, runs)
        row = whole_rounds(
            model, choice, users, tokens=tokens, runs=runs, rounds=number, noise=settings.noise, is_evaluated=runs > 1
        )
        rounds.append(row)
        report(title, row)
    return {
        "machine": vars(measured),
        "parameters": model.layout.total,
        "updates": updates,
        "rounds": rounds,
    }


def _choices(choice: EngineChoice, kinds: Sequence[str], precisions: Sequence[str]) -> Iterator[EngineChoice]:
    """Yield the engines to compare: each kind, with each precision if it has several."""
    for kind in kinds:
        for precision in precisions if kind in ("auto", "stacked") else ("auto",):
            yield replace(choice, kind=kind, precision=precision)


def _rounds_of_few_seconds(device: torch.device, users: int, tokens: int, runs: int) -> int:
    """Return how many rounds to time, so that a measurement takes seconds and not minutes."""
    if device.type != "cuda":
        return 4
    return 20 if runs > 1 else max(4, 16_000_000 // tokens // users)


def machine(device: torch.device) -> Machine:
    """Measure the memory bandwidth and the matrix products of a device, in about a second."""
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
    """Time the paper's user update: batches of 8, unroll 10, one epoch, clipped after every step.

    Args:
        model: The model to train.
        choice: The engine and the device.
        num_users: Users in the cohort.
        tokens: Tokens of each user (the paper's 1,600).
        seconds: The least total time to measure.

    Returns:
        The engine, users and tokens per second, and the peak memory in bytes.
    """
    engine, plan = choice.build(model), benchmark_plan(num_users).at(0, model.layout)
    users = list(synthetic_users(model.vocabulary_size, num_users, tokens))
    params_P = model.initial(0).to(engine.device)
    _forget_peak(engine.device)

    def update() -> None:
        """Compute the sum of the cohort and wait for it."""
        engine.sum_updates(params_P, users, plan, reproducible_generator(0)).units_P.cpu()

    update()  # compiles and fills caches
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


def limits(model: LanguageModel, device: Machine, bytes_per_number: int = 4, *, tokens: int = 1600) -> dict[str, float]:
    """Users per second if only memory bandwidth, or only arithmetic, were the limit.

    At every local step each parameter is read twice and written once, and takes part in three products with each of the
    80 positions of a batch (the embedding in the output layer, every other parameter once).

    Args:
        model: The model.
        device: The measured limits of the machine.
        bytes_per_number: 2 for bfloat16, 4 for float32.
        tokens: Tokens of each user.
    """
    steps, positions = tokens / 80, 80
    moved = 3 * model.layout.total * bytes_per_number * steps
    operations = 6 * model.layout.total * positions * steps
    rate = device.bfloat16_per_second if bytes_per_number == 2 else device.float32_per_second
    return {"memory": device.bytes_per_second / moved, "arithmetic": rate / operations}


def whole_rounds(
    model: LanguageModel,
    choice: EngineChoice,
    users_per_round: int,
    *,
    runs: int = 1,
    rounds: int = 20,
    tokens: int = 1600,
    noise: Noise = GaussianNoise(noise_multiplier=1.0),
    is_evaluated: bool = False,
) -> dict[str, Any]:
    """Time training itself: rounds of one or several runs on synthetic users, with everything that a round does.

    Args:
        model: The model to train.
        choice: The engine and the device.
        users_per_round: Expected users in a round.
        runs: Runs that train at the same time.
        rounds: Rounds to time; three more run first, to compile and to fill caches (20 if `is_evaluated`).
        tokens: Tokens of each user; 80 are one local step.
        noise: The noise of a round.
        is_evaluated: Whether each run is evaluated on 75,000 tokens every 20 rounds, as in the paper. `rounds` is then
            rounded up to a multiple of 20.

    Returns:
        Users and rounds per second, over all runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        population = max(4000, 4 * users_per_round)
        held_out = EVALUATION.max_tokens // 200 if is_evaluated else 2
        corpus = _synthetic_store(Path(folder) / "store", model.vocabulary_size, population, tokens, held_out)
        warm_up, every = (EVALUATION.every, EVALUATION.every) if is_evaluated else (3, 10**6)
        rounds = -(-rounds // every) * every + 1 if is_evaluated else rounds
        run = Run(
            corpus=corpus,
            model=model,
            plan=replace(benchmark_plan(users_per_round, population), noise=noise),
            training=Training(rounds=rounds + warm_up, checkpoint_every=10**6),
            evaluation=replace(EVALUATION, every=every) if is_evaluated else Evaluation(every=every, max_tokens=200),
            ledger=Path(folder) / "ledger.jsonl",
        )
        outs = [(run, Path(folder) / f"run-{k}") for k in range(runs)]
        reports = train_together(outs, engine=choice, allow_no_privacy=isinstance(noise, NoNoise))
        began, ended = 0.0, 0.0
        device = choice.torch_device()
        for _, report in reports:
            # The last round evaluates and saves; it is not measured.
            if report.round == warm_up:
                began = _now(device)
            if report.round == rounds + warm_up - 1:
                ended = _now(device)
        done = rounds - 1
    return {
        "users_per_round": users_per_round,
        "tokens_per_user": tokens,
        "runs_at_once": runs,
        "users_per_second": done * users_per_round * runs / (ended - began),
        "rounds_per_second": done * runs / (ended - began),
    }


def _synthetic_store(path: Path, vocabulary_size: int, population: int, tokens: int, held_out: int) -> Path:
    """A store of synthetic users, and of `held_out` held-out users of 200 tokens."""
    store = write_store(
        path,
        train=[user.tokens for user in synthetic_users(vocabulary_size, population, tokens)],
        held_out=[user.tokens for user in synthetic_users(vocabulary_size, held_out, 200)],
        vocabulary=Vocabulary.of([f"w{k}" for k in range(vocabulary_size - 3)]),
        info={"tokens": {"kind": "words"}, "vocabulary": {"kind": "file", "source": "synthetic"}, "synthetic": True},
    )
    return store.path


def _is_coarse(choice: EngineChoice) -> bool:
    return choice.precision == "bfloat16" or (choice.precision == "auto" and choice.torch_device().type == "cuda")


def benchmark_plan(users_per_round: int, population: int | None = None) -> Plan:
    """The paper's plan for a cohort of this size: FedAvg, a flat clip of 15, noise with z = 1.

    Args:
        users_per_round: Expected users per round.
        population: The declared population; None for ten times as many.
    """
    return Plan(
        population=population or 10 * users_per_round,
        sampling=PoissonSampling(users_per_round=users_per_round),
        update=FedAvg(),
        clip=FlatClip(norm=15.0),
        noise=GaussianNoise(noise_multiplier=1.0),
    )


def synthetic_users(vocabulary_size: int, count: int, tokens: int) -> Iterator[User]:
    """Yield users with words by Zipf's law. Their first token is BOS, so that each has exactly `tokens` targets.

    Args:
        vocabulary_size: The number of token ids, BOS, EOS and UNK included.
        count: The number of users.
        tokens: Targets of each user.
    """
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, vocabulary_size - 2)
    edges = np.cumsum(share / share.sum())
    for number in range(count):
        words = 3 + np.searchsorted(edges, rng.random(tokens)).clip(max=vocabulary_size - 4)
        yield User(np.concatenate([[BOS], words]), None, number)


def _seconds(work: Any, device: torch.device, at_least: float = 0.3) -> float:
    """The median time of at least three calls that together take at least `at_least` seconds."""
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
