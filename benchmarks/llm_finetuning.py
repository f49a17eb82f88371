"""What user-level privacy costs a fine-tuned language model: base, without noise, and at two epsilons, three seeds.

    unheard base smollm2 --out base
    unheard prepare blogs.jsonl.zst ... --tokens base/tokenizer.json --tokens-per-user 1600 --out corpora/blogs
    python -m benchmarks.llm_finetuning --base base --out results/llm --minutes 90 blogs=corpora/blogs scotus=corpora/scotus

For each corpus and seed it trains LoRA without noise, and at each epsilon with sampling of users (FedAvg) and with
sampling of examples (one gradient per example), for about the same number of tokens per round. The noise follows from
the declared population, which is the true one. Every finished run is kept: the same command continues after a stop, and
`--minutes` limits one call. results.json and results.md are written again after each run. `--noise-only` solves for the
noise of all runs on a machine without a GPU first, and keeps it in OUT/noise.json.

The base may have seen public text, these corpora among it; and the weights of SmolLM2 were quantised to 4 bits. Both are
said beside the results.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import unheard
from unheard.evaluation.next_word import evaluate
from unheard.models.base import record_of
from unheard.privacy.accountants import best_epsilon
from unheard.privacy.events import ExampleGaussian, PoissonGaussian
from unheard.privacy.planner import default_delta
from unheard.updates.user_update import users_in_turn

SEEDS = (1, 2, 3)
EPSILONS = (8.0, 2.0)
KEPT = ("loss", "perplexity", "accuracy_top1", "accuracy_top3")


def noise_for(file: Path, epsilon: float, delta: float, event_at: Any, rounds: int) -> float:
    """The smallest noise multiplier, to 1 %, at which so many rounds keep to epsilon; kept in a file for other seeds."""
    known: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    name = f"{event_at(1.0)}, epsilon {epsilon}, delta {delta}, rounds {rounds}"
    if name not in known:
        known[name] = _least_noise(epsilon, delta, event_at, rounds)
        file.write_text(json.dumps(known, indent=2) + "\n")
    return known[name]


def _least_noise(epsilon: float, delta: float, event_at: Any, rounds: int) -> float:
    low, high = 0.2, 0.4
    while best_epsilon([(event_at(high), rounds)], delta).epsilon > epsilon:
        low, high = high, 2 * high
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        if best_epsilon([(event_at(middle), rounds)], delta).epsilon > epsilon:
            low = middle
        else:
            high = middle
    return high


def run_of(args: argparse.Namespace, corpus: Path, kind: str, epsilon: float | None, seed: int) -> unheard.Run:
    """One run: kind is "users" or "examples"; epsilon None is without noise and without a bound."""
    store = unheard.TokenStore.open(corpus)
    population = store.train.num_users  # the true population of these public corpora
    delta = default_delta(population)
    rounds = args.rounds
    if kind == "users":
        sampling: Any = unheard.PoissonSampling(users_per_round=args.users_per_round)
        update: Any = unheard.FedAvg(batch_size=2, unroll=args.unroll, learning_rate=args.learning_rate)
        q = args.users_per_round / population

        def event_at(z: float) -> Any:
            return PoissonGaussian(sampling_prob=q, noise_multiplier=z)
    else:
        G = -(-1600 // args.unroll)
        total = population * G
        per_round = args.users_per_round * G
        sampling = unheard.ExampleSampling(examples_per_user=G, examples_per_round=per_round, total_examples=total)
        update = unheard.FedSGD(unroll=args.unroll, learning_rate=args.learning_rate)

        def event_at(z: float) -> Any:
            return ExampleGaussian(sampling_prob=per_round / total, examples_per_user=G, noise_multiplier=z)

    noise = (
        unheard.NoNoise()
        if epsilon is None
        else unheard.GaussianNoise(
            noise_multiplier=noise_for(args.out / "noise.json", epsilon, delta, event_at, rounds)
        )
    )
    return unheard.Run(
        corpus=corpus,
        model=unheard.HuggingFaceModel(
            path=str(args.base), train="lora", lora_rank=args.rank, lora_freeze_a=args.freeze_a, base_is_public=True
        ),
        plan=unheard.Plan(
            population=population,
            sampling=sampling,
            update=update,
            clip=unheard.FlatClip(norm=args.clip) if epsilon is not None else unheard.NoClip(),
            noise=noise,
        ),
        training=unheard.Training(rounds=rounds, init_seed=seed),
        evaluation=unheard.Evaluation(every=max(1, rounds // 4), max_tokens=args.tokens, unroll=args.unroll),
    )


def finish(run: unheard.Run, folder: Path, until: float) -> bool:
    """Trains or continues a run until its end or the time limit; whether it has ended."""
    reports = (
        unheard.resume(folder, allow_no_privacy=True)
        if folder.exists()
        else unheard.train(run, folder, again=True, allow_no_privacy=True)
    )
    for _ in reports:
        if time.monotonic() > until:
            reports.close()
            return False
    return True


def base_metrics(run: unheard.Run) -> dict[str, float]:
    """Of the base itself: LoRA begins with a product of zero."""
    store = unheard.TokenStore.open(run.corpus)
    users = run.evaluation.choose(users_in_turn(store.held_out, run.model))
    return evaluate(run.model, run.model.initial(0), users, unroll=run.evaluation.unroll)


def write(out: Path, results: dict[str, Any], args: argparse.Namespace) -> None:
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    record = record_of(args.base)
    lines = ["# Fine-tuning with user-level privacy", "", *(f"{c}" for c in (record.caveats if record else [])), ""]
    lines += ["| run | seconds | epsilon | " + " | ".join(KEPT) + " |", "| --- | ---: | ---: |" + " ---: |" * len(KEPT)]
    for name, row in sorted(results.items()):
        figures = " | ".join(f"{row[key]:.4g}" for key in KEPT)
        lines.append(f"| {name} | {row['seconds']:.0f} | {row['epsilon']} | {figures} |")
    (out / "results.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", nargs="+", help="name=STORE")
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--users-per-round", type=float, default=200)
    parser.add_argument("--unroll", type=int, default=256)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--freeze-a", action="store_true")
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--tokens", type=int, default=50_000, help="held-out tokens of an evaluation")
    parser.add_argument("--noise-only", action="store_true", help="solve for the noise of all runs, which needs no GPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.noise_only:
        for path in (Path(corpus.partition("=")[2]) for corpus in args.corpora):
            for kind, epsilon in ((k, e) for e in EPSILONS for k in ("users", "examples")):
                print(path.name, kind, epsilon, run_of(args, path, kind, epsilon, 1).plan.noise, flush=True)
        return
    until = time.monotonic() + 60 * args.minutes
    file = args.out / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name, _, path in (corpus.partition("=") for corpus in args.corpora):
        for seed in SEEDS:
            for kind, epsilon in [("users", None), *((k, e) for e in EPSILONS for k in ("users", "examples"))]:
                title = f"{name}, {kind}, epsilon {epsilon or 'infinity'}, seed {seed}"
                if title in results or time.monotonic() > until:
                    continue
                run = run_of(args, Path(path), kind, epsilon, seed)
                if f"{name}, base" not in results:
                    metrics = base_metrics(run)
                    results[f"{name}, base"] = {**{k: metrics[k] for k in KEPT}, "seconds": 0.0, "epsilon": 0}
                    write(args.out, results, args)
                folder, begun = args.out / title.replace(", ", "-").replace(" ", "_"), time.monotonic()
                if not finish(run, folder, until):
                    print(f"stopped in {title}; the same command continues", flush=True)
                    return
                metrics = unheard.evaluate(folder, max_tokens=args.tokens)
                spent = unheard.statement(folder)["claimed"]["epsilon"]
                results[title] = {
                    **{k: metrics[k] for k in KEPT},
                    "seconds": time.monotonic() - begun,
                    "epsilon": spent,
                }
                write(args.out, results, args)
                print(title, json.dumps(results[title]), flush=True)


if __name__ == "__main__":
    main()
