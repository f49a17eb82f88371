"""The speed of the engine `vectorised` for Hugging Face models: sums of whole cohorts, and a plain peft loop beside it.

    python -m benchmarks.hugging_face --model smollm2 --train lora --unroll 512 --batch-size 2 --users 256
    python -m benchmarks.hugging_face --base base/ --train lora --lengths lengths.npy

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
from unheard.updates.users import User

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
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = HuggingFaceModel if args.base else RandomModel
    model = kind(path=args.base or args.model, train=args.train, base_is_public=True)
    lengths = np.load(args.lengths)[: args.users] if args.lengths else np.full(args.users, 1600)
    plan = plan_of(model, args.batch_size, args.unroll, args.users)
    params_P = model.initial(0).to(device)
    result = measure(VectorisedEngine(model, device), model, params_P, lengths, plan, args.rounds)
    if args.peft:
        result["peft_users_per_s_of_1600"] = round(peft_users_per_s(model, lengths[: args.peft], plan, device), 2)
    print(json.dumps({"model": args.base or args.model, "train": args.train, "unroll": args.unroll, **result}))


if __name__ == "__main__":
    main()
