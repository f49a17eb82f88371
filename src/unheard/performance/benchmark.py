"""Measures how fast this machine trains: user updates per second of each engine, whole rounds, and hardware limits.

    run_benchmark(model, EngineChoice(), Settings())                   # everything that `unheard benchmark` measures
    user_updates(model, EngineChoice(), 100)["users_per_second"]       # the updates alone
    whole_rounds(model, EngineChoice(), 100)["users_per_second"]       # training, with noise and a ledger on disk
    limits(model, machine(device))                                     # what memory and arithmetic would allow

Input: a model and a choice of engine. Output: dictionaries of numbers, which `unheard benchmark` prints. Users are
synthetic (words drawn by Zipf's law), so no corpus is needed. Whole rounds do everything that training does: they
sample from a temporary store, read it, add secure noise and charge a ledger on disk.
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
"""Tokens per user: as in the paper, and as many as one local step takes."""
SECONDS_OF_UPDATES = 3.0
"""The updates alone are repeated until they have taken this long in total."""
USERS_OF_RUNS = 100
"""Users per round when several runs are timed side by side."""
EVALUATION = Evaluation()
"""The default evaluations of a training run: every 20 rounds on 75,000 tokens, as in the paper."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The measured hardware limits of a machine.

    Attributes:
        device: The name of the device.
        bytes_per_second: Memory bandwidth, measured by copying a large array; a copied byte counts twice (read, write).
        float32_per_second: Floating-point operations per second in a large matrix product in float32.
        bfloat16_per_second: Floating-point operations per second in a large matrix product in bfloat16.
    """

    device: str
    bytes_per_second: float
    float32_per_second: float
    bfloat16_per_second: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a benchmark measures. None selects a default that depends on the device.

    Args:
        engines: The engines whose user updates are timed.
        precisions: The precisions to compare; None for bfloat16 and float32 on a GPU, float32 on a CPU.
        users: The cohort sizes for user updates; None for 100 and 1,024 on a GPU, 4 on a CPU.
        rounds: The numbers of users per round for whole rounds with 1,600 tokens per user; None for 100 and 1,250 on a
            GPU, 4 on a CPU; 0 skips this measurement.
        short: The numbers of users per round for whole rounds with 80 tokens per user (one local step); None for 1,000
            and 5,000 on a GPU, and to skip this measurement on a CPU.
        runs: How many runs to train side by side; None for 16 on a GPU, 0 on a CPU; 0 skips this measurement.
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
        """Return these settings with each None replaced by the default for the device."""
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
        choice: The device, and the engine for whole rounds. For user updates `settings` names engines and precisions.
        settings: What to measure.
        begin: Called with the title of each measurement before it starts.
        report: Called at the end of each measurement of speed, with its title and result.

    Returns:
        A record that JSON can hold: `machine`; `parameters`, the number of the model's parameters; `updates`, the
        results of `user_updates`, with the speed as a share of each hardware limit; `rounds`, the results of
        `whole_rounds`.
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
    """Yield the engines to compare. Kinds that support several precisions are combined with each precision."""
    for kind in kinds:
        for precision in precisions if kind in ("auto", "stacked") else ("auto",):
            yield replace(choice, kind=kind, precision=precision)


def _rounds_of_few_seconds(device: torch.device, users: int, tokens: int, runs: int) -> int:
    """Return a number of rounds such that a measurement takes seconds, not minutes."""
    if device.type != "cuda":
        return 4
    return 20 if runs > 1 else max(4, 16_000_000 // tokens // users)


def machine(device: torch.device) -> Machine:
    """Measure the memory bandwidth of a device and its speed in matrix products. Takes about a second."""
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


def user_updates(model: LanguageModel, choice: EngineChoice, num_users: int) -> dict[str, Any]:
    """Time the paper's user update: batches of 8 windows, unroll 10, one epoch, a clip after every step.

    Args:
        model: The model to train.
        choice: The engine and the device.
        num_users: Users in the cohort.

    Returns:
        `engine`, `precision` and `users` describe the measurement. `users_per_second` and `tokens_per_second` are
        computed from the median time. `bytes_per_number` is 2 for bfloat16, else 4. `peak_memory_bytes` is the peak of
        this measurement on a GPU; on a CPU it is the peak of the whole process so far.
    """
    engine, plan = choice.build(model), benchmark_plan(num_users).at(0, model.layout)
    users = list(synthetic_users(model.vocabulary_size, num_users, LONG_TEXT))
    params_P = model.initial(0).to(engine.device)
    _forget_peak(engine.device)

    def update() -> None:
        """Compute the sum of the cohort's updates and wait until it is in CPU memory."""
        engine.sum_updates(params_P, users, plan, reproducible_generator(0)).units_P.cpu()

    update()  # the first call compiles kernels and fills caches, so it is not timed
    each = _seconds(update, engine.device, SECONDS_OF_UPDATES)
    return {
        "engine": type(engine).__name__,
        "precision": choice.precision,
        "users": num_users,
        "users_per_second": num_users / each,
        "tokens_per_second": num_users * LONG_TEXT / each,
        "bytes_per_number": 2 if _is_coarse(choice) else 4,
        "peak_memory_bytes": _peak(engine),
    }


def limits(model: LanguageModel, device: Machine, bytes_per_number: int) -> dict[str, float]:
    """Compute the users per second that the memory bandwidth alone, and the arithmetic alone, would allow.

    The model of the computation: at every local step each parameter is read twice and written once, and takes part in
    three products (one forward, two backward) with each of the 80 positions of a batch. The embedding does so in the
    output layer only.

    Args:
        model: The model.
        device: The measured limits of the machine.
        bytes_per_number: 2 for bfloat16, 4 for float32.

    Returns:
        Users per second: `memory` and `arithmetic`.
    """
    steps, positions = LONG_TEXT / 80, 80
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
    """Time the rounds of one or several real training runs on synthetic users.

    Before the measurement, three warm-up rounds compile kernels and fill caches (20 rounds if `is_evaluated`).

    Args:
        model: The model to train.
        choice: The engine and the device.
        users_per_round: Expected users per round.
        runs: How many runs train at the same time.
        rounds: Rounds of each run after the warm-up. The last is not timed, because it evaluates and saves.
        tokens: Tokens of each user; 80 tokens are one local step.
        noise: The noise of a round.
        is_evaluated: Whether each run is evaluated on 75,000 tokens every 20 rounds, as in the paper. The number of
            timed rounds is then `rounds`, rounded up to a multiple of 20.

    Returns:
        `users_per_second` and `rounds_per_second`, summed over all runs; and `users_per_round`, `tokens_per_user` and
        `runs_at_once`, which describe the measurement.
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
            # The clock stops before the last round, which also evaluates and saves.
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
    """Write a store of synthetic users and return its path.

    Args:
        path: The folder to create.
        vocabulary_size: The number of token ids, BOS, EOS and UNK included.
        population: The number of training users.
        tokens: Tokens of each training user.
        held_out: The number of held-out users; each has 200 tokens.
    """
    store = write_store(
        path,
        train=[user.tokens for user in synthetic_users(vocabulary_size, population, tokens)],
        held_out=[user.tokens for user in synthetic_users(vocabulary_size, held_out, 200)],
        vocabulary=Vocabulary.of([f"w{k}" for k in range(vocabulary_size - 3)]),
        info={"tokens": {"kind": "words"}, "vocabulary": {"kind": "file", "source": "synthetic"}, "synthetic": True},
    )
    return store.path


def _is_coarse(choice: EngineChoice) -> bool:
    """Whether the engine computes in bfloat16, which "auto" selects on a GPU."""
    return choice.precision == "bfloat16" or (choice.precision == "auto" and choice.torch_device().type == "cuda")


def benchmark_plan(users_per_round: int, population: int | None = None) -> Plan:
    """Return a plan as in the paper, for cohorts of this size: FedAvg, a flat clip with S = 15, noise with z = 1.

    Args:
        users_per_round: Expected users per round.
        population: The declared population; None for ten times `users_per_round`.
    """
    return Plan(
        population=population or 10 * users_per_round,
        sampling=PoissonSampling(users_per_round=users_per_round),
        update=FedAvg(),
        clip=FlatClip(norm=15.0),
        noise=GaussianNoise(noise_multiplier=1.0),
    )


def synthetic_users(vocabulary_size: int, count: int, tokens: int) -> Iterator[User]:
    """Yield users whose words are drawn by Zipf's law. The users are the same at each call.

    Args:
        vocabulary_size: The number of token ids, BOS, EOS and UNK included.
        count: The number of users.
        tokens: The number of targets of each user. BOS comes before them and is not counted.
    """
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, vocabulary_size - 2)
    edges = np.cumsum(share / share.sum())
    for number in range(count):
        words = 3 + np.searchsorted(edges, rng.random(tokens)).clip(max=vocabulary_size - 4)
        yield User(np.concatenate([[BOS], words]), None, number)


def _seconds(work: Any, device: torch.device, at_least: float = 0.3) -> float:
    """Return the median time of one call, in seconds.

    The function is called once without timing, and then at least three times and for at least `at_least` seconds.
    """
    work()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < at_least:
        began = _now(device)
        work()
        taken.append(_now(device) - began)
    return float(np.median(taken))


def _now(device: torch.device) -> float:
    """Return the time in seconds, after all work queued on the device is done."""
    finish(device)
    return time.perf_counter()


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(engine: Engine) -> int:
    """Return the peak memory in bytes: of the GPU since `_forget_peak`, or of this process since it started."""
    if engine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(engine.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
