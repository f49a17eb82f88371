"""The speed of the engine `vectorised` for Hugging Face models: sums of whole cohorts, and a plain peft loop beside it.

    python -m benchmarks.hugging_face --model smollm2 --train lora --unroll 512 --batch-size 2 --users 256
    python -m benchmarks.hugging_face --base base/ --train lora --lengths lengths.npy
    python -m benchmarks.hugging_face --unroll 256 --parts

`--parts` measures one stream: settings of the kernels of attention and of the loss, and the time by kernel; one JSON
line for each, as soon as it is known.

Without `--base` the model has the shape of the named one and random weights, which take the same time. Users have
random tokens: 1,600 each, or the lengths of a file. Figures are tokens per second divided by 1,600.
"""

import argparse
import json
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

import unheard
from unheard.engines.engine import Drawn
from unheard.engines.reference import ReferenceEngine
from unheard.engines.vectorised import VectorisedEngine
from unheard.models.hugging_face import HuggingFaceModel, StoreVocabularyModel, with_lora
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
"""The shapes of known models: SmolLM2-135M, TinyLlama-1.1B, GPT-2-small, and one for trying this script."""


@dataclass(frozen=True, kw_only=True)
class RandomModel(HuggingFaceModel):
    """A model of a known shape with random weights."""

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
        return self._module.get_buffer("row_V").numel()


def users_of(lengths: np.ndarray, vocabulary: int, seed: int = 0) -> list[User]:
    rng = np.random.default_rng(seed)
    return [User(rng.integers(3, vocabulary, size=int(n)), None, k) for k, n in enumerate(lengths)]


def plan_of(model: Any, batch_size: int | None, unroll: int, users: int) -> Any:
    update = unheard.FedAvg(batch_size=batch_size, unroll=unroll, learning_rate=0.1)
    return unheard.Plan(
        population=10_000,
        sampling=unheard.PoissonSampling(users_per_round=users),
        update=update,
        clip=unheard.FlatClip(norm=0.5),
        noise=unheard.GaussianNoise(noise_multiplier=1.0),
    ).at(0, model.layout)


def wait() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(engine: Any, model: Any, params_P: torch.Tensor, lengths: np.ndarray, plan: Any, rounds: int) -> dict:
    """The first round with compilation, and the best and the middle of the following rounds."""
    users = users_of(lengths, model.vocabulary_size)
    times = []
    for number in range(rounds + 1):
        begun = wait()
        engine.sum_updates(params_P, users, plan, Drawn(number))
        times.append(wait() - begun)
    tokens = int(sum(len(user.tokens) for user in users))
    later = sorted(times[1:])
    return {
        "users": len(users),
        "tokens": tokens,
        "first_s": round(times[0], 2),
        "round_s": round(later[len(later) // 2], 4),
        "users_per_s_of_1600": round(tokens / 1600 / later[len(later) // 2], 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if torch.cuda.is_available() else None,
    }


def peft_users_per_s(model: Any, lengths: np.ndarray, plan: Any, device: torch.device) -> float:
    """The plain loop on the same users and the same base."""
    import copy

    from benchmarks.peft_loop import sum_of_users

    base = copy.deepcopy(model.store_module.base).to(device)
    base.get_base_model().config._attn_implementation = "sdpa"
    for name, p in base.named_parameters():
        p.requires_grad_("lora_" in name)
        if "lora_" not in name:
            p.data = p.data.to(torch.bfloat16)
    users = users_of(lengths, model.vocabulary_size)
    batches = [plan.update.batches(user, 0) for user in users]
    row_V = model.store_module.get_buffer("row_V").to(device)
    sum_of_users(base, batches[:2], row_V, plan.update.learning_rate, 0.5)
    _, seconds = sum_of_users(base, batches, row_V, plan.update.learning_rate, 0.5)
    return sum(len(u.tokens) for u in users) / 1600 / seconds


def agreement(model: Any, params_P: torch.Tensor, plan: Any, device: torch.device, engine: Any) -> float:
    """The relative distance of the sum of 12 users from that of the engine `reference`, in float32."""
    lengths = np.array([1600, 40, 700, 1600, 12, 333, 900, 2, 1200, 64, 1600, 500])
    users = users_of(lengths, model.vocabulary_size, seed=7)
    fast = engine.sum_updates(params_P, users, plan, Drawn(0)).units_P.double()
    plain = ReferenceEngine(model, device).sum_updates(params_P, users, plan, Drawn(0)).units_P.double()
    return float((fast.cpu() - plain.cpu()).norm() / plain.norm().cpu())


# ------------------------------------------------------------------------------------------ parts of a stream

TILES = (64, 128)
SETTINGS = (
    {"OTHERS": 64, "num_warps": 4, "num_stages": 2},
    {"OTHERS": 64, "num_warps": 4, "num_stages": 3},
    {"OTHERS": 64, "num_warps": 8, "num_stages": 2},
    {"OTHERS": 32, "num_warps": 4, "num_stages": 2},
)


def milliseconds(work: Any, times: int = 5) -> float:
    """The median time of some work on the GPU, after one call that does not count."""
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
    """Times of attention for one layer: FlashAttention, and the kernels with each setting; sets the best."""
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
            except Exception as error:  # a setting that needs more shared memory than there is
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
    """The kernels that take the most time: name, calls and milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    rows = [(e.key[:90], e.count, round(e.self_device_time_total / 1e3, 3)) for e in profiler.key_averages()]
    return sorted(rows, key=lambda row: -row[2])[:count]


def stream_of(packed: Any, step: Any, plan: Any, vocabulary: int) -> None:
    """Copies a full stream of users with 1,600 tokens to the device."""
    from unheard.engines.packed import _Work

    users = users_of(np.full(step.packed.size.users, 1600), vocabulary)
    host = step.next_host()
    packed._fill(host, [_Work(k, list(plan.update.batches(user, 0))) for k, user in enumerate(users)], plan)
    step.run(host)


def score_times(rows: int, tokens: int = 4096) -> list[dict]:
    """Times of the gradient of the loss by the logits of some tokens, for numbers of warps."""
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


def parts(args: argparse.Namespace, model: Any, params_P: torch.Tensor, lengths: np.ndarray, plan: Any) -> None:
    """Whole cohorts, one stream, and the kernels in it."""

    def say(**line: Any) -> None:
        print(json.dumps({"s": round(time.perf_counter() - begun), **line}), flush=True)

    begun = time.perf_counter()
    engine = VectorisedEngine(model, torch.device("cuda"))
    result = measure(engine, model, params_P, lengths, plan, args.rounds)
    packed = engine._compiled["packed"]
    step = packed._step_for(plan)
    stream_of(packed, step, plan, model.vocabulary_size)
    size = step.packed.size
    say(**result, stream=size.tokens, places=size.users, stream_ms=milliseconds(step.graph.replay))
    say(by_kernel=by_kernel(step.graph.replay, 40))
    say(difference_from_reference=agreement(model, params_P, plan, torch.device("cuda"), engine))
    for line in [*score_times(step.packed._num_rows()), *best_attention(model, args.unroll)]:
        say(**line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="smollm2")
    parser.add_argument("--base", help="a folder of save_pretrained, in place of --model")
    parser.add_argument("--train", choices=["lora", "all"], default="lora")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--unroll", type=int, default=512)
    parser.add_argument("--users", type=int, default=256)
    parser.add_argument("--lengths", help="a .npy file with the number of tokens of each user")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peft", type=int, default=0, help="users of the plain peft loop; 0: none")
    parser.add_argument("--parts", action="store_true", help="measure parts of the computation, on a GPU")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = HuggingFaceModel if args.base else RandomModel
    model = kind(path=args.base or args.model, train=args.train, base_is_public=True)
    lengths = np.load(args.lengths)[: args.users] if args.lengths else np.full(args.users, 1600)
    plan = plan_of(model, args.batch_size, args.unroll, args.users)
    params_P = model.initial(0).to(device)
    if args.parts:
        parts(args, model, params_P, lengths, plan)
        return
    result = measure(VectorisedEngine(model, device), model, params_P, lengths, plan, args.rounds)
    if args.peft:
        result["peft_users_per_s_of_1600"] = round(peft_users_per_s(model, lengths[: args.peft], plan, device), 2)
    print(json.dumps({"model": args.base or args.model, "train": args.train, "unroll": args.unroll, **result}))


if __name__ == "__main__":
    main()
