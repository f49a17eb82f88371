"""Measure the speed of Hugging Face models on a GPU: whole rounds, a plain peft loop for comparison, and the kernels.

    python -m benchmarks.hugging_face --lengths lengths.npy --stop-after 170      # every row, as a table at the end
    python -m benchmarks.hugging_face --only smollm2 --variants                   # one model, with switches
    python -m benchmarks.hugging_face --parts                                     # one stream, kernel by kernel
    python -m benchmarks.hugging_face --tune                                      # settings of the kernels
    python -m benchmarks.hugging_face --lengths lengths.npy --streams             # how full streams are; needs no GPU

A row trains whole rounds with `unheard.train`: cohorts are drawn, charged, summed, averaged and noised, and the server
takes its step. Models have the shape of the named models and random weights. Users have random tokens, which take the
same time as real ones: 1,600 tokens per user as in blogs, or the numbers of tokens in the file `--lengths`. The speed
is tokens per second divided by 1,600, over all rounds except the first, which also compiles. The script prints one JSON
line per result as soon as it is known. For a row that fails it prints the error and continues with the next row.

Before the rows, every kernel is compared with its readable version on the GPU. `--variants` measures the sum of a cohort
with parts of the engine switched off or changed, which shows what the kernels and the merged products gain.
"""

import argparse
import gc
import json
import math
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unheard
from unheard.corpus.store import write_store
from unheard.corpus.vocabulary import Vocabulary
from unheard.engines import packed as engine_module
from unheard.engines.engine import Drawn
from unheard.engines.reference import ReferenceEngine
from unheard.engines.vectorised import VectorisedEngine
from unheard.models import packed as model_module
from unheard.models import packed_layers as layers_module
from unheard.models.hugging_face import HuggingFaceModel, StoreVocabularyModel, with_lora
from unheard.models.model import BaseModel
from unheard.training.run import MODELS
from unheard.updates.user_update import User

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
        },
    ),
    "llama-1.1b": (
        "llama",
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
        },
    ),
    "gpt2": ("gpt2", {"n_positions": 2048}),
    "tiny": (
        "llama",
        {
            "vocab_size": 500,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
        },
    ),
}
"""Architecture and configuration of SmolLM2-135M, TinyLlama-1.1B and GPT-2-small, and of a tiny model to try this
script."""


@dataclass(frozen=True, kw_only=True)
class RandomModel(HuggingFaceModel):
    """A model with the shape `SHAPES[path]` and random weights, instead of a folder of weights."""

    @cached_property
    def _module(self) -> StoreVocabularyModel:
        from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

        kind, settings = SHAPES[self.path]
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            base = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), attn_implementation="eager")
        base = base.eval()
        if self.train == "lora":
            base = with_lora(base, rank=self.lora_rank, alpha=self.lora_alpha, layers=self.lora_layers)
        rows = base.config.vocab_size
        return StoreVocabularyModel(base, [0, 1, 2, *range(3, rows)])

    @property
    def vocabulary_size(self) -> int:
        return self.store_module.get_buffer("row_V").numel()

    def pinned(self, vocabulary_size: int | None = None) -> "RandomModel":
        return self

    def check_store(self, *args: Any, **kwargs: Any) -> None:
        BaseModel.check_store(self, *args, **kwargs)


MODELS["random"] = RandomModel  # so that a run file can name it


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table: a model and the settings of its rounds.

    Args:
        model: A key of `SHAPES`.
        train: "lora" (rank 8) or "all".
        users: Users per round.
        batch_size: Windows in a local batch.
        unroll: Tokens in a window.
        is_short: Whether users have the numbers of tokens of the file `--lengths` instead of 1,600.
        must: The required speed in users of 1,600 tokens per second; None if there is no requirement.
    """

    model: str
    train: str
    users: int
    batch_size: int = 2
    unroll: int
    is_short: bool = False
    must: float | None = None

    @property
    def title(self) -> str:
        lengths = "lengths of the file" if self.is_short else "1,600 tokens"
        return f"{self.model}, {self.train}, {self.batch_size} x {self.unroll}, {self.users} users of {lengths}"


ROWS = (
    Row(model="smollm2", train="lora", users=512, unroll=256, must=300),
    Row(model="smollm2", train="lora", users=2000, unroll=256, is_short=True),
    Row(model="llama-1.1b", train="lora", users=128, unroll=400, must=50),
    Row(model="gpt2", train="all", users=128, unroll=400, must=30),
)
"""The rows, in order. The first SmolLM2 row is also compared with a plain peft loop, and must be 8 times as fast."""


SMALL = Row(model="tiny", train="lora", users=40, unroll=64)
"""A row to try this script."""


def random_model(row: Row) -> RandomModel:
    """Return the model of a row."""
    return RandomModel(path=row.model, train=row.train, base_is_public=True)  # pyright: ignore[reportArgumentType]


def users_of(lengths: np.ndarray, vocabulary: int, seed: int = 0) -> list[User]:
    """Return users with random tokens.

    Args:
        lengths: The number of tokens of each user.
        vocabulary: Size of the vocabulary.
        seed: Seed of the tokens.
    """
    rng = np.random.default_rng(seed)
    return [User(rng.integers(3, vocabulary, size=int(n)), None, k) for k, n in enumerate(lengths)]


def plan_of(batch_size: int | None, unroll: int, users: float, population: int = 10_000) -> unheard.Plan:
    """Return the plan of a private run with these sizes."""
    return unheard.Plan(
        population=population,
        sampling=unheard.PoissonSampling(users_per_round=users),
        update=unheard.FedAvg(batch_size=batch_size or 8, unroll=unroll, learning_rate=0.1),
        clip=unheard.FlatClip(norm=0.5),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    )


def wait() -> float:
    """Wait until the GPU has finished, and return the time in seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# ------------------------------------------------------------------------------------------- whole rounds


class Counting:
    """Wraps an engine, and records for each call of `sum_cohorts` the tokens of all cohorts and the seconds."""

    def __init__(self, engine: VectorisedEngine) -> None:
        self.engine, self.device = engine, engine.device
        self.tokens: list[int] = []
        self.seconds: list[float] = []

    def sum_cohorts(self, cohorts: Sequence[Any]) -> list[Any]:
        self.tokens.append(sum(len(user.tokens) for cohort in cohorts for user in cohort.users))
        begun = wait()
        sums = self.engine.sum_cohorts(cohorts)
        self.seconds.append(wait() - begun)
        return sums

    def sum_updates(self, *args: Any) -> Any:
        return self.engine.sum_updates(*args)


def whole_rounds(
    row: Row, lengths: np.ndarray, folder: Path, rounds: int, engine: VectorisedEngine, say: Any
) -> dict[str, Any]:
    """Train some rounds of a run on a store of random tokens, and return the result of the row.

    Args:
        row: The row.
        lengths: Numbers of tokens from which those of the users are drawn.
        folder: A temporary folder.
        rounds: Number of rounds, after the first.
        engine: The engine.
        say: Function that prints a JSON line.
    """
    model: Any = engine.model
    drawn = np.random.default_rng(1).choice(lengths, size=4 * row.users)
    users = [user.tokens for user in users_of(drawn, model.vocabulary_size)]
    words = Vocabulary.of([f"w{k}" for k in range(model.vocabulary_size - 3)])
    write_store(folder / "store", train=users, held_out=users[:1], vocabulary=words, info={"tokens": {"kind": "words"}})
    run = unheard.Run(
        corpus=folder / "store",
        model=model,
        plan=plan_of(row.batch_size, row.unroll, row.users, population=4 * row.users),
        training=unheard.Training(rounds=10**6, checkpoint_every=10**6),
        evaluation=unheard.Evaluation(every=10**6, max_tokens=100),
    )
    counting, ends = Counting(engine), [wait()]
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    reports = unheard.train(run, folder / "run", on=counting)  # pyright: ignore[reportArgumentType]
    for _, _report in zip(range(rounds + 1), reports, strict=False):
        ends.append(wait())
        say(round_of=row.title, round_s=round(ends[-1] - ends[-2], 3), sums_s=round(counting.seconds[-1], 3))
    seconds, tokens = ends[-1] - ends[1], sum(counting.tokens[1 : rounds + 1])
    reports.close()
    return {
        "row": row.title,
        "must": row.must,
        "users_per_s_of_1600": round(tokens / 1600 / seconds, 1),
        "sums_only": round(tokens / 1600 / sum(counting.seconds[1 : rounds + 1]), 1),
        "round_s": round(seconds / rounds, 3),
        "first_round_s": round(ends[1] - ends[0], 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if torch.cuda.is_available() else None,
    }


def count_streams(row: Row, lengths: np.ndarray) -> dict[str, Any]:
    """Return how many streams a cohort needs and how full they are.

    Streams are filled but not computed, so a tiny model is used.
    """
    model, ran = random_model(replace(row, model="tiny")), []
    users = users_of(np.random.default_rng(1).choice(lengths, size=row.users), model.vocabulary_size)
    plan = plan_of(row.batch_size, row.unroll, row.users).at(0, model.layout)
    size = engine_module.TOKENS_AT_ONCE
    packed = engine_module.PackedCohorts(model, torch.device("cpu"), torch.float32, tokens_at_once=size)
    with switched({(engine_module._Step, "run"): lambda step, host: ran.append(host)}):
        packed.sum_updates(model.initial(0), users, plan, 0)
    share = sum(len(user.tokens) for user in users) / (size * len(ran))
    return {"streams_of": row.title, "streams": len(ran), "full": round(share, 3)}


# ---------------------------------------------------------------------------------------- sums of cohorts


def measure(engine: Any, users: list[User], plan: Any, params_P: torch.Tensor, times: int = 2) -> dict[str, Any]:
    """Return the speed of summing one cohort: the first time, with compilation, and the best of `times` more."""
    taken = []
    for number in range(times + 1):
        begun = wait()
        engine.sum_updates(params_P, users, plan, Drawn(number))
        taken.append(wait() - begun)
    tokens = sum(len(user.tokens) for user in users)
    return {"users_per_s_of_1600": round(tokens / 1600 / min(taken[1:]), 1), "first_s": round(taken[0], 1)}


def peft_speed(row: Row, engine: VectorisedEngine, users: list[User]) -> dict[str, Any]:
    """Return the speed of the plain peft loop (`peft_loop.py`) on some users, with the model and settings of a row."""
    import copy

    from benchmarks.peft_loop import sum_of_users

    model: Any = engine.model
    plan = plan_of(row.batch_size, row.unroll, row.users).at(0, model.layout)
    base = copy.deepcopy(model.store_module.base).to(engine.device)
    base.get_base_model().config._attn_implementation = "sdpa"
    for name, p in base.named_parameters():
        p.requires_grad_("lora_" in name)
        if "lora_" not in name:
            p.data = p.data.to(torch.bfloat16)
    batches = [plan.update.batches(user, 0) for user in users]
    row_V = model.store_module.get_buffer("row_V").to(engine.device)
    sum_of_users(base, batches[:2], row_V, plan.update.learning_rate, 0.5)
    _, seconds = sum_of_users(base, batches, row_V, plan.update.learning_rate, 0.5)
    speed = sum(len(u.tokens) for u in users) / 1600 / seconds
    return {"row": "plain peft loop", "users": len(users), "users_per_s_of_1600": round(speed, 2)}


def agreement(model: Any, params_P: torch.Tensor, plan: Any, device: torch.device, engine: Any) -> float:
    """Return the relative distance of the sum of 12 users from the sum of the engine `reference` in float32."""
    lengths = np.array([1600, 40, 700, 1600, 12, 333, 900, 2, 1200, 64, 1600, 500])
    users = users_of(lengths, model.vocabulary_size, seed=7)
    fast = engine.sum_updates(params_P, users, plan, Drawn(0)).units_P.double()
    plain = ReferenceEngine(model, device).sum_updates(params_P, users, plan, Drawn(0)).units_P.double()
    return float((fast.cpu() - plain.cpu()).norm() / plain.norm().cpu())


VARIANTS: dict[str, Mapping[tuple[Any, str], Any]] = {
    "as it is": {},
    "before the gated kernels": {
        (model_module, "gated_layers"): lambda module: None,
        (engine_module, "fast_score_gradient"): lambda: torch.compile(model_module.score_gradient, dynamic=False),
    },
    "2 places for each batch": {(engine_module, "PLACES"): 2},
    "separate products": {(model_module, "SAME_INPUT"): (), (model_module, "gated_layers"): lambda module: None},
    "FlashAttention": {(model_module, "USES_KERNELS"): False},
}
"""Variants of the engine, by title: constants of modules, each with the value that it has in the variant."""


@contextmanager
def switched(changes: Mapping[tuple[Any, str], Any]) -> Iterator[None]:
    """Set constants of modules, and restore them at the end."""
    before = {(module, name): getattr(module, name) for module, name in changes}
    for (module, name), value in changes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


# ------------------------------------------------------------------------------------------------ kernels


def relative(given: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference, divided by the norm of `expected`."""
    given, expected = given.detach().double(), expected.detach().double()
    return float((given - expected).norm() / expected.norm())


def check_kernels(tokens: int = 4096, rows: int = 49152) -> dict[str, float]:
    """Return the relative difference of each kernel, in bfloat16 on the GPU, from its readable version in float32."""
    from unheard.models import packed_kernels as kernels

    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    torch.manual_seed(1)
    found: dict[str, float] = {}
    lengths = torch.tensor([0, 256, 1, 255, 512, 63, 65, 800, 144, 256, 0, 488, tokens - 2840], device="cuda")
    ends_M = lengths.cumsum(0).to(torch.int32)
    for heads, groups, width in ((9, 3, 64), (32, 4, 64), (12, 12, 64)):
        inputs = [torch.randn(tokens, n, width, **make) for n in (heads, groups, groups)]
        grad = torch.randn(tokens, heads, width, **make)
        leaves = [t.float().requires_grad_() for t in inputs]
        expected = layers_module.plain_attention(*leaves, ends_M, width**-0.5)
        gradients = torch.autograd.grad(expected, leaves, grad.float())
        tiles = kernels.attention_tiles(ends_M, tokens)
        output, lse = kernels.attention(*inputs, tiles, width**-0.5)
        given = kernels.attention_gradients(grad, *inputs, output, lse, tiles, width**-0.5)
        pairs = zip((output, *given), (expected, *gradients), strict=True)
        found[f"attention {heads}/{groups}"] = max(relative(one, other) for one, other in pairs)
    logits = 3 * torch.randn(512, rows, **make)
    target, silent = torch.randint(0, rows - 5, (512,), device="cuda"), torch.zeros(rows, device="cuda").bool()
    silent[-5:] = True
    weight = torch.rand(512, device="cuda") * (torch.arange(512, device="cuda") % 7 > 0)
    expected = model_module.score_gradient(logits.float(), target, weight, silent)
    found["gradient of the loss"] = relative(kernels.score_gradient_(logits, target, weight, silent), expected)
    both, grad = torch.randn(tokens, 2 * 1536, **make), torch.randn(tokens, 1536, **make)
    leaf = both.float().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    found["gated product"] = relative(kernels.gated_product(both), expected)
    (by_both,) = torch.autograd.grad(expected, leaf, grad.float())
    found["gated gradient"] = relative(kernels.gated_gradient(grad, both), by_both)
    found |= check_low_rank(tokens)
    return {name: round(value, 5) for name, value in found.items()}


def check_low_rank(tokens: int, users: int = 8, wide: int = 576, rank: int = 8) -> dict[str, float]:
    """Return the relative differences of the low-rank products, for users with `tokens / users` tokens each."""
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x, grad, weight = (torch.randn(n, wide, **make) for n in (tokens, tokens, wide))
    a, b = torch.randn(users, rank, wide, device="cuda"), torch.randn(users, wide, rank, device="cuda")
    ends = torch.arange(users + 1, device="cuda", dtype=torch.int32) * (tokens // users)
    span_2C = torch.stack([ends[:-1], ends[1:]])
    others: Any = ([0], [2.0], span_2C)
    whole, small = layers_module.low_rank_product(x, weight, None, [a], [b], *others)
    given = [whole, *layers_module.low_rank_gradients(grad, x, small, weight, [a], [b], *others)]
    with switched({(layers_module, "USES_KERNELS"): False}):
        x, grad, weight = (t.float() for t in (x, grad, weight))
        whole, small = layers_module.low_rank_product(x, weight, None, [a], [b], *others)
        expected = [whole, *layers_module.low_rank_gradients(grad, x, small, weight, [a], [b], *others)]
    names = ("product", "gradient by x", "gradient by A", "gradient by B")
    return {f"low-rank {name}": relative(one, other) for name, one, other in zip(names, given, expected, strict=True)}


# ------------------------------------------------------------------------------------------ parts of a stream

TILES = (64, 128)
"""Tile sizes of the attention kernels that `--tune` tries."""
SETTINGS = (
    {"OTHERS": 64, "num_warps": 4, "num_stages": 2},
    {"OTHERS": 64, "num_warps": 4, "num_stages": 3},
    {"OTHERS": 64, "num_warps": 8, "num_stages": 2},
    {"OTHERS": 32, "num_warps": 4, "num_stages": 2},
)
"""Settings of the attention kernels that `--tune` tries."""


def milliseconds(work: Any, times: int = 5) -> float:
    """Return the median milliseconds of a function on the GPU, after one call that is not timed."""
    work()
    torch.cuda.synchronize()
    taken = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    return round(sorted(taken)[times // 2], 4)


def best_attention(model: Any, unroll: int, tokens: int = 2**15) -> list[dict]:
    """Time the attention of one layer: FlashAttention, and the kernels with each setting. Keep the best setting.

    Args:
        model: The model, whose heads are used.
        unroll: Tokens in a window.
        tokens: Tokens in the stream.

    Returns:
        A line per setting, with the milliseconds of the forward and of the backward pass.
    """
    from unheard.models import packed_kernels as kernels
    from unheard.models.packed_layers import packed_attention, packed_attention_backward

    config = model.store_module.base.config
    H, G = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    D = config.hidden_size // H
    make = {"dtype": torch.bfloat16, "device": "cuda"}
    query, grad = (torch.randn(tokens, H, D, **make) for _ in range(2))
    key, value = (torch.randn(tokens, G, D, **make) for _ in range(2))
    count = -(-tokens // unroll)
    ends = (torch.arange(2 * count + 258, device="cuda") * unroll).clamp(max=tokens).to(torch.int32)

    def times(tiles: torch.Tensor) -> tuple[float, float]:
        few = (query, key, value)
        output, lse = packed_attention(*few, ends, tiles, unroll, D**-0.5)
        forward = milliseconds(lambda: packed_attention(*few, ends, tiles, unroll, D**-0.5))
        backward = milliseconds(
            lambda: packed_attention_backward(grad, *few, output, lse, ends, tiles, unroll, D**-0.5)
        )
        return forward, backward

    lines = [{"attention": "flash", "ms": times(torch.zeros(3, 0, dtype=torch.int32, device="cuda"))}]
    best: dict[int, list[Any]] = {}
    for kernels.TILE in TILES:
        tiles = kernels.attention_tiles(ends, tokens)
        best[kernels.TILE] = [(9e9, {}), (9e9, {})]
        for setting in SETTINGS:
            kernels.FORWARD = kernels.BACKWARD = setting
            try:
                ms = times(tiles)
            except Exception as error:  # a setting may need more shared memory than the GPU has
                lines.append({"attention": "kernels", "tile": kernels.TILE, **setting, "error": str(error)[:100]})
                continue
            lines.append({"attention": "kernels", "tile": kernels.TILE, **setting, "ms": ms})
            for way in range(2):
                best[kernels.TILE][way] = min(best[kernels.TILE][way], (ms[way], setting), key=lambda pair: pair[0])
    kernels.TILE = min(best, key=lambda tile: sum(ms for ms, _ in best[tile]))
    (_, kernels.FORWARD), (_, kernels.BACKWARD) = best[kernels.TILE]
    lines.append({"attention": "best", "tile": kernels.TILE, "forward": kernels.FORWARD, "backward": kernels.BACKWARD})
    return lines


def by_kernel(work: Any, count: int = 25) -> list[tuple[str, int, float]]:
    """Return the kernels that take the most time: name, number of calls and milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    rows = [(e.key[:90], e.count, round(e.self_device_time_total / 1e3, 3)) for e in profiler.key_averages()]
    return sorted(rows, key=lambda row: -row[2])[:count]


def stream_of(packed: Any, step: Any, plan: Any, vocabulary: int) -> None:
    """Fill a stream with users of 1,600 tokens and run it once, so that its buffers on the device are full."""
    from unheard.engines.packed import _Work

    users = users_of(np.full(step.packed.size.users, 1600), vocabulary)
    host = step.next_host()
    packed._fill(
        host,
        [_Work(k, len(user.tokens), lambda user=user: plan.update.batches(user, 0)) for k, user in enumerate(users)],
        plan,
    )
    step.run(host)


def score_times(rows: int, tokens: int = 4096) -> list[dict]:
    """Time the kernel of the loss's gradient by the logits, for several numbers of warps and block sizes."""
    from unheard.models import packed_kernels as kernels

    logits_LR = torch.randn(tokens, rows, dtype=torch.bfloat16, device="cuda")
    target_L = torch.randint(0, rows, (tokens,), device="cuda")
    weight_L = torch.full((tokens,), 1e-3, device="cuda")
    silent_R = torch.zeros(rows, dtype=torch.bool, device="cuda")
    lines, kept = [], (kernels.SCORE_WARPS, kernels.BLOCK)
    for kernels.SCORE_WARPS, kernels.BLOCK in ((8, 4096), (16, 4096), (16, 8192), (32, 8192), (32, 16384)):
        ms = milliseconds(lambda: kernels.score_gradient_(logits_LR, target_L, weight_L, silent_R))
        lines.append({"score_gradient": {"warps": kernels.SCORE_WARPS, "block": kernels.BLOCK}, "ms": ms})
    kernels.SCORE_WARPS, kernels.BLOCK = kept
    return lines


def parts(say: Any, engine: VectorisedEngine, plan: Any, unroll: int, *, is_tuned: bool) -> None:
    """Print the time of one stream and of the kernels in it and, if `is_tuned`, of other settings of the kernels."""
    model: Any = engine.model
    packed = engine._compiled["packed"]
    step = packed._step_for(plan)
    stream_of(packed, step, plan, model.vocabulary_size)
    say(stream=step.packed.size.tokens, places=step.packed.size.users, stream_ms=milliseconds(step.graph.replay))
    say(by_kernel=by_kernel(step.graph.replay, 40))
    if is_tuned:
        for line in [*score_times(step.packed._num_rows()), *best_attention(model, unroll)]:
            say(**line)


def beside(say: Any, row: Row, engine: VectorisedEngine, args: argparse.Namespace) -> None:
    """Print what is measured in addition to the first row.

    This is the speed of the peft loop, the difference from the reference engine, and the parts of a stream.
    """
    model: Any = engine.model
    plan = plan_of(row.batch_size, row.unroll, row.users).at(0, model.layout)
    params_P = model.initial(0).to(engine.device)
    with errors_said(say, "plain peft loop"):
        if args.peft:
            say(**peft_speed(row, engine, users_of(np.full(args.peft, 1600), model.vocabulary_size)))
    with errors_said(say, "difference from the reference"):
        say(difference_of_12_users_from_reference=round(agreement(model, params_P, plan, engine.device, engine), 4))
    with errors_said(say, "parts of a stream"):
        if engine.device.type == "cuda" and (args.parts or args.tune):
            parts(say, engine, plan, row.unroll, is_tuned=args.tune)


def variants(say: Any, row: Row, device: torch.device, is_over: Any) -> None:
    """Print the speed of summing one cohort with each of `VARIANTS`, until `is_over()` is true."""
    for title, changes in VARIANTS.items():
        if is_over():
            return
        release()
        with errors_said(say, title), switched(changes):
            model = random_model(row)
            users = users_of(np.full(row.users, 1600), model.vocabulary_size)
            plan = plan_of(row.batch_size, row.unroll, row.users).at(0, model.layout)
            say(variant=title, **measure(VectorisedEngine(model, device), users, plan, model.initial(0).to(device)))


def lengths_of(row: Row, file: str) -> np.ndarray:
    """Return the numbers of tokens from which those of the row's users are drawn."""
    return np.minimum(np.load(file), 1600) if row.is_short else np.array([1600])


@contextmanager
def errors_said(say: Any, title: str) -> Iterator[None]:
    """Print an error as a JSON line instead of raising it, so that the other measurements continue."""
    try:
        yield
    except Exception as error:
        say(failed=title, error=repr(error)[:500], where=traceback.format_exc()[-1500:])


def release() -> None:
    """Free the memory of models that are no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(lines: list[dict[str, Any]]) -> str:
    """Return the results of the rows as a Markdown table."""
    given = ["| row | must | users/s of 1,600 tokens | sums only | first round, s | GB |", "| --- |" + " ---: |" * 5]
    for line in (line for line in lines if "row" in line):
        figures = [line.get(k) for k in ("must", "users_per_s_of_1600", "sums_only", "first_round_s", "peak_gb")]
        given.append(f"| {line['row']} | " + " | ".join("" if f is None else f"{f:g}" for f in figures) + " |")
    return "\n".join(given)


def main() -> None:
    """Run the measurements that the options name, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(SHAPES), help="run only the rows of one model")
    parser.add_argument("--lengths", help="a .npy file with the numbers of tokens of users, for the second row")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of a row, after the first")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the users per round, to try the script")
    parser.add_argument("--peft", type=int, default=6, help="users of the plain peft loop; 0: none")
    parser.add_argument("--variants", action="store_true", help="after the rows, time variants of the engine")
    parser.add_argument("--parts", action="store_true", help="after the first row, time one stream kernel by kernel")
    parser.add_argument("--tune", action="store_true", help="as --parts, and try other settings of the kernels")
    parser.add_argument("--streams", action="store_true", help="only count the streams of the rows with LoRA")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS")
    args = parser.parse_args()
    begun, lines = time.perf_counter(), []
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def say(**line: Any) -> None:
        lines.append(line)
        print(json.dumps({"s": round(time.perf_counter() - begun), **line}), flush=True)

    def is_over() -> bool:
        return time.perf_counter() - begun > args.stop_after

    say(device=torch.cuda.get_device_name() if device.type == "cuda" else "CPU", torch=torch.__version__)
    with errors_said(say, "kernels"):
        if device.type == "cuda":
            say(differences_of_kernels=check_kernels())
    rows = [row for row in ROWS if args.only in (None, row.model)] or [SMALL]
    rows = [replace(row, users=max(2, round(args.scale * row.users))) for row in rows]
    if args.streams:
        longer = [replace(row, unroll=512) for row in rows if row.is_short]
        for row in (*rows, *longer):
            if row.train == "lora" and (args.lengths or not row.is_short):
                say(**count_streams(row, lengths_of(row, args.lengths)))
        return
    engine: Any = None
    for row in rows:
        if is_over() or (row.is_short and args.lengths is None):
            continue
        if engine is None or (engine.model.path, engine.model.train) != (row.model, row.train):
            engine = None
            release()
            engine = VectorisedEngine(random_model(row), device)
        lengths = lengths_of(row, args.lengths)
        with errors_said(say, row.title), tempfile.TemporaryDirectory() as folder:
            say(**whole_rounds(row, lengths, Path(folder), args.rounds, engine, say))
        if row is rows[0]:
            beside(say, row, engine, args)
    engine = None
    if args.variants:
        variants(say, replace(rows[0], users=min(rows[0].users, 256)), device, is_over)
    print(table(lines))


if __name__ == "__main__":
    main()
