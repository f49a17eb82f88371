"""Time: rounds one after the other, each charged before it starts, saved so that a crash loses little and never under-counts.

In: a Run and a folder. Out: a generator of reports; its caller is the callback (print, plot, stop by leaving the loop).
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unheard.corpus.store import TokenStore
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed.process_group import Ranks
from unheard.engines.engine import Engine
from unheard.errors import BudgetExceeded, InvalidValue, LedgerError
from unheard.evaluation.next_word import evaluate
from unheard.mechanism.noise import NoNoise, Normals, NormalsAhead
from unheard.mechanism.plan import RoundPlan
from unheard.privacy.accountants import RunningEpsilon
from unheard.privacy.ledger import Ledger
from unheard.privacy.population_ledger import JointLedger
from unheard.privacy.statement import statement
from unheard.randomness import ReproducibleStreams, SecureStreams, Streams
from unheard.run_folder import RunFolder, replace_file
from unheard.training.checkpoint import newest_checkpoint, save_checkpoint
from unheard.training.concurrent_runs import RoundReport, Rounds, alone, side_by_side
from unheard.training.initialise import (
    charge_the_past,
    check_checkpoint,
    check_public,
    corpus_name,
    enter,
    first_state,
    names,
    population_ledger_of,
    public_facts,
)
from unheard.training.round import draw_cohort, learn
from unheard.training.run import Run
from unheard.training.run_file import cure_for, read_saved_run, run_hash, run_toml
from unheard.training.server import State
from unheard.training.validate import check_fits
from unheard.training.worker import build, reach, spread_of
from unheard.updates.users import users_in_turn


def train(
    run: Run,
    out: str | Path,
    *,
    engine: EngineChoice = EngineChoice(),
    ranks: Ranks | None = None,
    again: bool = False,
) -> Iterator[RoundReport]:
    """Begin a run in a new folder. What can be refused beforehand is refused here, before the folder appears. `ranks` are the
    processes to train on (training/worker.py). `again`: this was begun before, by processes that died; if so, it goes on."""
    run = pinned(run)
    built = build(engine, run.model, ranks)
    if again and RunFolder(Path(out)).run_file.exists():
        return alone(_go_on(run, RunFolder.open(out), built), built)
    return alone(_begin(run, out, engine, built), built)


def resume(
    out: str | Path,
    *,
    rounds: int | None = None,
    corpus: str | Path | None = None,
    engine: EngineChoice | None = None,
    ranks: Ranks | None = None,
) -> Iterator[RoundReport]:
    """Go on from the newest checkpoint, here or on another machine; `rounds` moves the end, `corpus` says where the store is."""
    folder = RunFolder.open(out)
    run, saved_engine = read_saved_run(folder.run_file)
    if rounds is not None:
        run = replace(run, training=replace(run.training, rounds=rounds))
    if corpus is not None:
        run = replace(run, corpus=Path(corpus))
    choice = engine or saved_engine
    if corpus is not None and ranks is None:
        choice = replace(choice, corpus_part=None)  # the whole store lies there now; parts were for those who began
    run = pinned(run)
    built = build(choice, run.model, ranks)
    return alone(_go_on(run, folder, built), built)


def train_together(
    runs: Sequence[tuple[Run, str | Path]], *, engine: EngineChoice = EngineChoice(), ranks: Ranks | None = None
) -> Iterator[tuple[int, RoundReport]]:
    """Several runs of one model side by side, each in a folder of its own; one that was begun before goes on. Each report comes
    with its run's place in the list. Every run is equal to running it alone."""
    if not runs:
        raise InvalidValue("There are no runs to train.")
    runs = [(pinned(run), out) for run, out in runs]
    if any(run.model != runs[0][0].model for run, _ in runs):
        raise InvalidValue("Runs side by side share one model's shape; give those of another model apart.")
    if len({Path(out).resolve() for _, out in runs}) < len(runs):
        raise InvalidValue("Each run needs a folder of its own.")
    built = build(engine, runs[0][0].model, ranks)
    going = [
        _go_on(run, RunFolder.open(out), built)
        if RunFolder(Path(out)).run_file.exists()
        else _begin(run, out, engine, built)
        for run, out in runs
    ]
    return side_by_side(going, built)


def _begin(run: Run, out: str | Path, engine: EngineChoice, built: Engine) -> Rounds:
    store = TokenStore.open(run.corpus)
    run = replace(run, corpus=Path(run.corpus).resolve(), ledger=run.ledger and Path(run.ledger).resolve())
    check_fits(run, store)
    reach(built, store)
    population = population_ledger_of(run, store)
    check_public(run, population)
    state = first_state(run)
    folder = RunFolder.begin(out)
    replace_file(folder.run_file, run_toml(run, engine).encode())
    replace_file(folder.vocabulary, (store.path / "vocabulary.txt").read_bytes())
    replace_file(folder.tokens, json.dumps(store.info.get("tokens", {}), indent=2).encode())
    ledger = Ledger.create(folder.ledger, {**public_facts(run, store, _streams(run)), **names(run)})
    charge_the_past(run, store, ledger)
    enter(run, ledger, population, Path(out).name)
    save_checkpoint(folder, run.model, state, ledger, run.training.keep_checkpoints)
    # DP: the folder appears with what was already spent in its ledger, and with the model that it begins from, or not at all.
    return _rounds(run, folder.settle(out), store, built)


def pinned(run: Run) -> Run:
    """The run with its model pinned: its hash covers the vocabulary size of the store and the digest of weights from elsewhere."""
    words = len(TokenStore.open(run.corpus).vocabulary) if run.model.vocabulary_size is None else None
    return replace(run, model=run.model.pinned(words))


def _go_on(run: Run, folder: RunFolder, built: Engine) -> Rounds:
    store = TokenStore.open(run.corpus)
    check_fits(run, store)
    facts = Ledger.read(folder.ledger).facts
    if facts.get("run_hash") != run_hash(run):
        raise LedgerError(
            f"{folder.run_file} was changed after the run began: its ledger is for another configuration. Put it back (rounds "
            f"may change), or begin a new run in another folder.{cure_for(run, str(facts.get('run_hash')))}"
        )
    if facts.get("corpus") != corpus_name(store):
        raise LedgerError(f"{run.corpus} is not the corpus that this run began with. Name the right one with --corpus.")
    reach(built, store)
    return _rounds(run, folder, store, built)


def _rounds(run: Run, folder: RunFolder, store: TokenStore, built: Engine) -> Rounds:
    """The rounds of one run. It asks for the sum of each cohort, and is sent it: who sums, and beside whom, is not its affair."""
    with folder.locked():
        ledger = JointLedger(Ledger.open(folder.ledger), population_ledger_of(run, store))
        running = RunningEpsilon(
            run.claimed_delta, run.budget.accountant if run.budget else "rdp", events=ledger.events
        )
        state = _where_we_were(run, folder, ledger, built.device)
        first_round = saved_round = state.round
        streams = _streams(run)
        how = run.evaluation
        held_out = how.choose(users_in_turn(store.held_out, run.model))
        folder.statement.unlink(missing_ok=True)  # it would be of fewer rounds than the model, should we be killed
        try:
            while state.round < run.training.rounds:
                plan = run.plan.at(state.round, run.model.layout, state.clip_norm)
                event, attempt = plan.event(), len(ledger)
                try:
                    if run.budget:
                        # DP: a budget is a stop; the round that would exceed it never starts.
                        run.budget.check(running, event, state.round)
                    # DP: charge before release. The event is on disk, in the people's ledger and then in the run's, before a
                    # user's text is read; a crash can only over-count.
                    ledger.charge(event, state.round)
                except BudgetExceeded as refusal:
                    if state.round == first_round:
                        raise
                    yield _report(run, state, running, stopped=str(refusal))
                    break
                running.charge(event)
                cohort = draw_cohort(state, plan, run.model, store.train, streams, attempt)
                normals = _normals(plan, streams, attempt, built.device)
                total = yield cohort
                assert total is not None
                state = learn(state, plan, run.model, run.server, total, normals, streams.count(attempt))
                is_last = state.round == run.training.rounds
                metrics = None
                if is_last or state.round % how.every == 0:
                    metrics = evaluate(run.model, state.params_P, held_out, unroll=how.unroll, spread=spread_of(built))
                    folder.append_metrics({"round": state.round, "epsilon": _or_none(running.epsilon), **metrics})
                if is_last or state.round % run.training.checkpoint_every == 0:
                    save_checkpoint(folder, run.model, state, ledger, run.training.keep_checkpoints)
                    saved_round = state.round
                yield _report(run, state, running, metrics)
        finally:
            # However the loop is left: at its end, by the caller, by Ctrl-C.
            if state.round > saved_round:
                save_checkpoint(folder, run.model, state, ledger, run.training.keep_checkpoints)
            write_statement(folder, ledger)


def _where_we_were(run: Run, folder: RunFolder, ledger: JointLedger, device: torch.device) -> State:
    """The newest checkpoint's state, if the ledger covers it."""
    checkpoint = newest_checkpoint(folder)
    # DP: a ledger that was shortened or swapped would make released models look cheaper than they were.
    if not ledger.contains(checkpoint.ledger_length, checkpoint.ledger_head):
        raise LedgerError(
            f"{folder.ledger} does not hold what was charged up to the newest checkpoint: it was shortened or replaced. "
            "Put the right one back; without it the cost of this model cannot be known."
        )
    check_checkpoint(run, ledger, checkpoint)
    state = checkpoint.state
    memory = {name: t.to(device) if t.ndim else t for name, t in state.server_memory.items()}
    return replace(state, params_P=state.params_P.to(device), server_memory=memory)


def _normals(plan: RoundPlan, streams: Streams, attempt: int, device: torch.device) -> Normals:
    """The round's noise, drawn beside its work."""
    rng = streams.noise(attempt)
    return rng if isinstance(plan.noise, NoNoise) else NormalsAhead(rng, plan.layout.total, device)


def _streams(run: Run) -> Streams:
    seed = run.training.reproducible_seed
    # DP: secure unless a seed is asked for by name.
    return SecureStreams() if seed is None else ReproducibleStreams(seed=seed)


def _report(
    run: Run, state: State, running: RunningEpsilon, metrics: dict[str, float] | None = None, stopped: str | None = None
) -> RoundReport:
    return RoundReport(
        round=state.round,
        rounds=run.training.rounds,
        epsilon=running.epsilon,
        delta=run.claimed_delta,
        metrics=metrics,
        stopped=stopped,
    )


def write_statement(folder: RunFolder, ledger: Ledger | JointLedger) -> dict[str, Any]:
    """statement.json from what the ledger says, and from nothing else."""
    made = statement(ledger.facts, ledger.entries)
    replace_file(folder.statement, json.dumps(made, indent=2).encode())
    return made


def _or_none(epsilon: float) -> float | None:
    """JSON has no infinity: an epsilon that does not exist is null."""
    return epsilon if math.isfinite(epsilon) else None
