"""Measure what user-level privacy costs a fine-tuned language model: base model, no noise, epsilon 8 and epsilon 2.

    unheard base smollm2 --out base
    unheard prepare blogs.jsonl.zst --user-field user --text-field text --time-field time --tokens base/tokenizer.json \\
        --tokens-per-user 512 --min-tokens 200 --held-out 0.05 --out corpora/blogs
    python -m benchmarks.llm_finetuning --base base --out results/llm --stop-after 600 \\
        blogs=corpora/blogs scotus=corpora/scotus
    python -m benchmarks.llm_finetuning --out results/llm --show

The corpus reviews_81 has settings of its own (`SHORT`), which a registered rule of reproduction/rules.toml names.

The result of each run is one line of OUT/results.jsonl, written when the run ends. The same command continues after a
stop: finished runs are skipped, and an unfinished run continues from its checkpoint. OUT/calls.jsonl has the seconds of
each call. `--solve` computes the noise multipliers of all runs, which needs no GPU, and writes them to
benchmarks/llm_noise.json.

Rules, fixed before the runs
----------------------------
- Runs: two corpora, three repetitions, and for each of them sampling of users (FedAvg) and of examples (one clipped
  gradient per window) without noise, at epsilon 8 and at epsilon 2. All have the rounds and the expected tokens per
  round of `SETTINGS`; only sampling, local steps, clip and noise differ. A repetition draws other cohorts and other
  noise.
- Epsilon is that of the statement: for adding or removing one user, at delta = N^-1.1, with N the number of users in
  train, which is the true population of these public corpora. The noise of a run spends from 98 to 100 % of it.
- Reported: loss, perplexity and top-1 accuracy of the model after the last round on `held_out_tokens` tokens of users
  who are in no cohort; no model is chosen by its result. Means over the repetitions, with the standard deviation.
- "Gain" is the loss of the base minus the loss of the model. Two ways differ if their mean losses differ by more than
  twice the standard error of the difference over the repetitions; else the text says "no difference seen".
- The learning rates and clips were chosen before the runs, on a CPU: from the norms of the gradients of 40 users of
  blogs at the base, and from the loss of three users of train along their mean and along random directions. With these
  settings almost every delta is clipped, so the clip is the size of a step. Nothing was tuned on held-out text, and
  nothing on scotus.
- Said beside every figure: the weights of the base were quantised to 4 bits; the base may have seen public text, these
  corpora among it; GPU minutes.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NOISE = Path(__file__).parent / "llm_noise.json"
"""File with the noise multipliers of all runs (`solve`)."""
SEEDS = (1, 2, 3)
"""Numbers of the repetitions."""
KINDS = ("users", "examples")
"""What is sampled."""
EPSILONS = (None, 8.0, 4.0, 2.0, 1.0)
"""Epsilons in the order of the tables; None without noise."""
clock = time.monotonic
KEPT = ("loss", "perplexity", "accuracy_top1", "accuracy_top3", "tokens")
"""Metrics that a result stores."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of all runs.

    Args:
        tokens_per_user: Number of tokens at which the stores cut each user.
        rounds: Rounds of each run.
        users_per_round: Expected users per round. A run that samples examples draws the windows of as many users.
        unroll: Tokens in a window.
        rank: Rank of LoRA, on the layers that peft chooses; the A matrices are frozen.
        clip: S of a user's delta, and S of an example's. The second is larger, because the delta of an example points
            less in the direction of the mean.
        learning_rate: Learning rate of local steps, for users and for examples.
        held_out_tokens: Number of tokens in an evaluation.
        kinds: What is sampled.
        epsilons: Epsilon of the runs; None without noise.
    """

    tokens_per_user: int = 512
    rounds: int = 20
    users_per_round: float = 240
    unroll: int = 128
    rank: int = 8
    clip: tuple[float, float] = (0.4, 0.6)
    learning_rate: tuple[float, float] = (0.6, 4.0)
    held_out_tokens: int = 50_000
    kinds: tuple[str, ...] = KINDS
    epsilons: tuple[float | None, ...] = (None, 8.0, 2.0)

    @property
    def examples_per_user(self) -> int:
        """The number of windows of a user, G."""
        return -(-self.tokens_per_user // self.unroll)


SETTINGS = Settings()
SHORT = Settings(
    tokens_per_user=128,
    rounds=100,
    users_per_round=2000,
    clip=(0.6, 0.6),
    learning_rate=(4.0, 4.0),
    held_out_tokens=10_000_000,
    kinds=("users",),
    epsilons=EPSILONS,
)
"""The settings of reviews_81, as the rule expect-far-lora in reproduction/rules.toml has them."""


def settings_of(corpus: str) -> Settings:
    """Return the settings of the runs on a corpus."""
    return SHORT if corpus == "reviews_81" else SETTINGS


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the comparison.

    Args:
        corpus: Name of the corpus.
        kind: "users" or "examples".
        epsilon: Epsilon of the run; None without noise.
        seed: Number of the repetition.
    """

    corpus: str
    kind: str
    epsilon: float | None
    seed: int

    @property
    def name(self) -> str:
        return f"{self.corpus}-{self.kind}-epsilon_{self.epsilon or 'infinity'}-seed_{self.seed}"


def jobs_of(corpora: list[str]) -> Iterator[Job]:
    """Yield all runs of some corpora. The first repetition of every run comes before the second of any."""
    for seed in SEEDS:
        for corpus in corpora:
            for kind in settings_of(corpus).kinds:
                for epsilon in settings_of(corpus).epsilons:
                    yield Job(corpus=corpus, kind=kind, epsilon=epsilon, seed=seed)


# ------------------------------------------------------------------------------------------------- noise


def event_of(kind: str, population: int, noise_multiplier: float, settings: Settings) -> Any:
    """Return the event of one round.

    Args:
        kind: "users" or "examples".
        population: Number of users.
        noise_multiplier: z.
        settings: The settings of the run.
    """
    from unheard.privacy.events import ExampleGaussian, PoissonGaussian

    q = settings.users_per_round / population
    if kind == "users":
        return PoissonGaussian(sampling_prob=q, noise_multiplier=noise_multiplier)
    return ExampleGaussian(
        sampling_prob=q, examples_per_user=settings.examples_per_user, noise_multiplier=noise_multiplier
    )


def noise_key(kind: str, population: int, epsilon: float, settings: Settings) -> str:
    """Return the key of a run in `NOISE`: a text with everything that its noise multiplier depends on."""
    sampled = f"{settings.users_per_round:g} of {population} users per round, {settings.rounds} rounds"
    examples = f", {settings.examples_per_user} examples per user" if kind == "examples" else ""
    return f"{kind}: {sampled}{examples}, epsilon {epsilon:g}"


def least_noise(kind: str, population: int, epsilon: float, settings: Settings) -> float:
    """Return a noise multiplier at which all rounds together spend 98 to 100 % of epsilon."""
    from unheard.privacy.accountants import best_epsilon
    from unheard.privacy.budget import default_delta

    def spent(z: float) -> float:
        """Return the epsilon of all rounds at noise multiplier z."""
        return best_epsilon(
            [(event_of(kind, population, z, settings), settings.rounds)], default_delta(population)
        ).epsilon

    # The secant method on logarithms, because log epsilon is nearly linear in log z.
    before, z = 1.0, 1.2 if kind == "users" else 1.5
    spent_before, now = spent(before), spent(z)
    while not 0.98 * epsilon <= now <= epsilon:
        slope = math.log(now / spent_before) / math.log(z / before)
        before, spent_before = z, now
        z = math.ceil(1e4 * z * (0.99 * epsilon / now) ** (1 / slope)) / 1e4
        now = spent(z)
    return z


def solve(stores: dict[str, Path]) -> None:
    """Compute the noise multipliers of all runs and write them to benchmarks/llm_noise.json. Known ones are kept."""
    import unheard

    known: dict[str, float] = json.loads(NOISE.read_text()) if NOISE.exists() else {}
    for corpus, path in stores.items():
        population, settings = unheard.TokenStore.open(path).train.num_users, settings_of(corpus)
        for kind in settings.kinds:
            for epsilon in filter(None, settings.epsilons):
                key = noise_key(kind, population, epsilon, settings)
                if key not in known:
                    known[key] = least_noise(kind, population, epsilon, settings)
                    NOISE.write_text(json.dumps(known, indent=2) + "\n")
                print(f"{key}: z = {known[key]}", flush=True)


# -------------------------------------------------------------------------------------------------- runs


def run_of(job: Job, store: Path, model: Any) -> Any:
    """Return the run of a job.

    Args:
        job: The job.
        store: The token store of its corpus.
        model: The model.
    """
    import unheard

    population, settings = unheard.TokenStore.open(store).train.num_users, settings_of(job.corpus)
    which = KINDS.index(job.kind)
    if job.kind == "users":
        sampling: Any = unheard.PoissonSampling(users_per_round=settings.users_per_round)
        update: Any = unheard.FedAvg(batch_size=1, unroll=settings.unroll, learning_rate=settings.learning_rate[which])
    else:
        G = settings.examples_per_user
        sampling = unheard.ExampleSampling(
            examples_per_user=G, examples_per_round=settings.users_per_round * G, total_examples=population * G
        )
        update = unheard.FedSGD(unroll=settings.unroll, learning_rate=settings.learning_rate[which])
    noise: Any = unheard.NoNoise()
    if job.epsilon is not None:
        key = noise_key(job.kind, population, job.epsilon, settings)
        z = json.loads(NOISE.read_text()).get(key) or least_noise(job.kind, population, job.epsilon, settings)
        noise = unheard.GaussianNoise(noise_multiplier=z)
    return unheard.Run(
        corpus=store,
        model=model,
        plan=unheard.Plan(
            population=population,
            sampling=sampling,
            update=update,
            clip=unheard.FlatClip(norm=settings.clip[which]),
            noise=noise,
        ),
        training=unheard.Training(rounds=settings.rounds, init_seed=job.seed, checkpoint_every=settings.rounds),
        evaluation=unheard.Evaluation(
            every=settings.rounds, max_tokens=settings.held_out_tokens, unroll=settings.unroll
        ),
    )


def base_result(corpus: str, store: Path, model: Any, device: Any) -> dict[str, Any]:
    """Return the metrics of the base model. The initial LoRA parameters do not change its output."""
    import unheard
    from unheard.evaluation.next_word import evaluate
    from unheard.updates.user_update import users_in_turn

    settings = settings_of(corpus)
    evaluation = unheard.Evaluation(max_tokens=settings.held_out_tokens, unroll=settings.unroll)
    users = evaluation.choose(users_in_turn(unheard.TokenStore.open(store).held_out, model))
    metrics = evaluate(model, model.initial(0).to(device), users, unroll=evaluation.unroll)
    return {"corpus": corpus, "kind": "base", "metrics": {key: metrics[key] for key in KEPT}}


def trained_result(job: Job, run: Any, folder: Path, engine: Any, until: float) -> dict[str, Any] | None:
    """Train a run, or continue it, and return its result; None if the time limit comes before its last round.

    Args:
        job: The job.
        run: Its run.
        folder: The run folder.
        engine: The engine.
        until: The time limit, by `clock`.
    """
    import unheard

    begun, last = clock(), None
    reports = unheard.train(run, folder, on=engine, again=True, allow_no_privacy=True)
    for last in reports:
        if clock() > until and last.round < last.rounds:
            reports.close()
            return None
    seconds = clock() - begun
    statement = json.loads((folder / "statement.json").read_text())
    metrics = last.metrics if last is not None else unheard.evaluate(folder)
    return {
        **asdict(job),
        "metrics": {key: metrics[key] for key in KEPT},
        "seconds": round(seconds, 1),
        "population": run.plan.population,
        "noise_multiplier": getattr(run.plan.noise, "noise_multiplier", 0.0),
        "charged": statement["rounds"]["charged"],
        "claimed": statement["claimed"],
        "delta": statement["delta"],
    }


def train_all(args: argparse.Namespace, stores: dict[str, Path], until: float) -> None:
    """Train all runs that are not finished, with one engine, until the time limit is reached.

    Args:
        args: The options of the command.
        stores: The token store of each corpus by its name.
        until: The time limit, by `clock`.
    """
    import torch
    from reproduction.measures import content_digest, facts

    import unheard
    from unheard.engines.vectorised import VectorisedEngine

    args.out.mkdir(parents=True, exist_ok=True)
    done = {name_of(line) for line in results_in(args.out)}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    origin = facts(device.type)
    digests = {corpus: content_digest(store) for corpus, store in stores.items()}

    def keep(line: dict[str, Any]) -> None:
        """Append a result to the file and print it."""
        line |= origin | {"settings": asdict(settings_of(line["corpus"])), "store_content": digests[line["corpus"]]}
        with open(args.out / "results.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps({key: line[key] for key in line if key != "settings"}), flush=True)

    model = unheard.HuggingFaceModel(
        path=str(args.base), train="lora", lora_rank=SETTINGS.rank, lora_freeze_a=True, base_is_public=True
    ).pinned()
    engine = VectorisedEngine(model, device)  # one for all runs: it compiles once for users and once for examples
    for corpus, store in stores.items():
        if f"{corpus}-base" not in done:
            keep(base_result(corpus, store, model, device))
    for job in jobs_of(list(stores)):
        if job.name in done:
            continue
        if clock() > until:
            print("The time limit is reached; the same command continues.", flush=True)
            return
        folder = (args.runs or args.out / "runs") / job.name
        result = trained_result(job, run_of(job, stores[job.corpus], model), folder, engine, until)
        if result is None:
            print(f"Stopped in {job.name}; the same command continues.", flush=True)
            return
        keep(result)


# --------------------------------------------------------------------------------------------- the results


def results_in(out: Path) -> list[dict[str, Any]]:
    """Return the results in a folder, in the order in which they were written."""
    file = out / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def name_of(line: dict[str, Any]) -> str:
    """Return the name of the run of a result, or `CORPUS-base` for the base model."""
    if line["kind"] == "base":
        return f"{line['corpus']}-base"
    return Job(**{key: line[key] for key in ("corpus", "kind", "epsilon", "seed")}).name


def show(out: Path) -> str:
    """Return the results as Markdown: a table of the models, a table of differences, and the time used."""
    lines = results_in(out)
    rows = ["| corpus | model | runs | loss | perplexity | top-1 | gain | z |", "| --- | --- | ---: |" + " ---: |" * 5]
    for corpus in dict.fromkeys(line["corpus"] for line in lines):
        own = [line for line in lines if line["corpus"] == corpus]
        base = next((line["metrics"] for line in own if line["kind"] == "base"), None)
        if base is not None:
            figures = f"{base['loss']:.4f} | {base['perplexity']:.2f} | {100 * base['accuracy_top1']:.2f} %"
            rows.append(f"| {corpus} | base | | {figures} | | |")
        for kind in KINDS:
            for epsilon in EPSILONS:
                some = [line for line in own if line["kind"] == kind and line["epsilon"] == epsilon]
                if not some:
                    continue
                losses = [line["metrics"]["loss"] for line in some]
                tops = [100 * line["metrics"]["accuracy_top1"] for line in some]
                loss = statistics.mean(losses)
                title = title_of(kind, epsilon)
                gain = "" if base is None else f"{base['loss'] - loss:.4f}"
                noise = "" if epsilon is None else f"{some[0]['noise_multiplier']:.3f}"
                rows.append(
                    f"| {corpus} | {title} | {len(some)} | {spread(losses, '.4f')} | {math.exp(loss):.2f} | "
                    f"{spread(tops, '.2f')} % | {gain} | {noise} |"
                )
    rows += ["", *differences(lines)]
    calls = [json.loads(line) for line in (out / "calls.jsonl").read_text().splitlines()] if lines else []
    devices = ", ".join(sorted({line["device"] for line in lines}))
    minutes = f"{sum(call['seconds'] for call in calls) / 60:.1f} minutes of {len(calls)} call{'s'[: len(calls) != 1]}"
    return "\n".join([*rows, "", f"{minutes} on {devices or 'nothing yet'}."])


def differences(lines: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table: for pairs of settings, whether their losses differ by the rule above."""
    losses: dict[tuple[str, str, float | None], list[float]] = {}
    for line in lines:
        if line["kind"] != "base":
            losses.setdefault((line["corpus"], line["kind"], line["epsilon"]), []).append(line["metrics"]["loss"])
    pairs = [((kind, None), (kind, epsilon)) for kind in KINDS for epsilon in filter(None, EPSILONS)]
    pairs += [(("users", epsilon), ("examples", epsilon)) for epsilon in EPSILONS]
    rows = [
        "| corpus | compared | difference of loss | twice its standard error | |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    for corpus in dict.fromkeys(line["corpus"] for line in lines):
        for one, other in pairs:
            both = [losses.get((corpus, *way), []) for way in (one, other)]
            if min(map(len, both)) < 2:
                continue
            difference = statistics.mean(both[1]) - statistics.mean(both[0])
            error = math.sqrt(sum(statistics.variance(some) / len(some) for some in both))
            verdict = "differ" if abs(difference) > 2 * error else "no difference seen"
            compared = f"{title_of(*other)} against {title_of(*one)}"
            rows.append(f"| {corpus} | {compared} | {difference:+.4f} | {2 * error:.4f} | {verdict} |")
    return rows


def title_of(kind: str, epsilon: float | None) -> str:
    """Return the title of a setting, such as `users, ε = 8`."""
    return f"{kind}, " + ("no noise" if epsilon is None else f"ε = {epsilon:g}")


def spread(values: list[float], form: str) -> str:
    """Return the mean of some values as text, with the standard deviation if there are several."""
    mean = f"{statistics.mean(values):{form}}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):{form}}"


def main() -> None:
    """Solve for the noise, or train, or only print the results, as the options say."""
    begun = clock()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", nargs="*", help="NAME=STORE for each corpus")
    parser.add_argument("--base", type=Path, help="a folder written by `unheard base`")
    parser.add_argument("--out", type=Path, help="folder of results.jsonl")
    parser.add_argument("--runs", type=Path, help="folder of the run folders; default: OUT/runs")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--show", action="store_true", help="print the table of the results and stop")
    parser.add_argument("--solve", action="store_true", help="solve for the noise of all runs and stop")
    args = parser.parse_args()
    stores = {name: Path(path) for name, _, path in (corpus.partition("=") for corpus in args.corpora)}
    if args.solve:
        solve(stores)
    elif not args.show:
        try:
            train_all(args, stores, begun + args.stop_after)
        finally:
            with open(args.out / "calls.jsonl", "a") as file:
                file.write(json.dumps({"seconds": round(clock() - begun, 1)}) + "\n")
    if args.out is not None:
        print(show(args.out))


if __name__ == "__main__":
    main()
