"""One leader and its crew: rank 0 runs the whole of training, every other rank waits, works on what it is asked for, and answers.

In: what torchrun started. Out: on the leader, an engine for training/loop.py that has all ranks behind it; on the others, `serve`.
Sampling, noise, ledger, checkpoints and the run folder are the leader's alone (docs/decisions/0050-one-leader.md): another rank has
no ledger to write and no noise to draw. How it is used, on every rank:

    ranks = Ranks.join()                       # None for a process that is alone
    if ranks is None or ranks.is_leader:
        for report in train(run, out, ranks=ranks): ...
        ranks and ranks.leave()
    else:
        serve(ranks)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from unheard.config import part_from_table, part_of_kind, table_from_part
from unheard.corpus.store import TokenStore
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed.engine import DistributedEngine, sum_share
from unheard.engines.distributed.parallel_map import Job, Spread, in_turn, on_ranks, work_on
from unheard.engines.distributed.process_group import Ranks, same_for_all
from unheard.engines.distributed.protocol import Message
from unheard.engines.distributed.store_replicas import Stores
from unheard.engines.engine import Engine
from unheard.errors import CorpusError, InvalidValue, UnheardError
from unheard.evaluation.next_word import tally
from unheard.evaluation.scores import places
from unheard.models.model import LanguageModel
from unheard.training.run_file import MODELS

JOBS: tuple[Job, ...] = (tally, places)
"""Work in batches that training and its measures ask for; the command line adds the audit's."""


def build(choice: EngineChoice, model: LanguageModel, ranks: Ranks | None = None) -> Engine:
    """The engine for one model: of this process alone, or with all ranks behind it."""
    if ranks is None:
        check_whole(choice)
        return choice.build(model)
    model = model.pinned()  # every rank reads the model's files for itself: they must be the same
    mine = at_rank(choice, ranks)
    engine = table_from_part(replace(choice, device=mine.torch_device().type))
    facts = {"model": table_from_part(model, MODELS), "engine": engine}
    ranks.tell(same_for_all(ranks, "begin", facts))
    local = mine.build(model)
    ranks.answers()
    ranks.tell(same_for_all(ranks, "connect", {}))
    ranks.connect(local.device, choice.rank_timeout)
    return DistributedEngine(local, ranks, Stores(ranks, choice.corpus_part), model.layout)


def check_whole(choice: EngineChoice) -> None:
    """A process that is alone needs everybody's text: a place for one part of it would have no effect."""
    if choice.corpus_part is not None:
        raise InvalidValue(
            f"engine.corpus_part = '{choice.corpus_part}' is where each of several processes has its part of the store, and this "
            "process is alone: it reads the whole store, at corpus.path. Start as many as hold all parts together (torchrun, "
            "--processes), or take corpus_part out of [engine]; to resume alone, name the whole store with --corpus."
        )


def spread_of(engine: Engine) -> Spread:
    """How measures of the same model are worked on."""
    return on_ranks(engine.ranks) if isinstance(engine, DistributedEngine) else in_turn


def spread_with(model: LanguageModel, ranks: Ranks | None) -> Spread:
    """The same for a model that is only measured, where its parameters are: on CPUs."""
    return in_turn if ranks is None else spread_of(build(EngineChoice(device="cpu"), model, ranks))


def reach(engine: Engine, store: TokenStore) -> None:
    """Before anything is charged: can everybody who may be drawn be read by somebody?"""
    if isinstance(engine, DistributedEngine):
        engine.reach(store)
    elif not store.train.shards_here.all():
        raise CorpusError(
            f"{store.path} is a part of a store: some of its users' text lies elsewhere. Train on ranks that hold all parts "
            "together (torchrun), or give the whole store."
        )


def at_rank(choice: EngineChoice, ranks: Ranks) -> EngineChoice:
    """The same choice with a device of this rank's own."""
    device = choice.torch_device()
    if device.type != "cuda":
        return choice
    if device.index is not None:
        raise InvalidValue(
            f"device = '{choice.device}' is one GPU, and every rank takes its own: use 'cuda' or 'auto'."
        )
    if torch.cuda.device_count() < ranks.local_size:
        raise InvalidValue(
            f"{ranks.local_size} ranks on a machine with {torch.cuda.device_count()} GPUs: start fewer, or use device = 'cpu'."
        )
    torch.cuda.set_device(ranks.local_rank)
    return replace(choice, device=f"cuda:{ranks.local_rank}")


def serve(ranks: Ranks, jobs: Sequence[Job] = JOBS) -> None:
    """What every rank but the leader does, until the leader lets it go. What goes wrong here is told there."""
    member = _Member(ranks, {getattr(job, "__name__", ""): job for job in jobs})
    to_add = None
    while (message := ranks.hear()).job != "end":
        if message.job == "connect":
            member.connect()
        elif message.job == "add" and to_add is not None:
            # DP: a rank adds its sum and nothing else. It has no streams: the noise is one draw, by the leader.
            ranks.add_up(to_add)
            to_add = None
        else:
            to_add = _answer(ranks, member, message)


def _answer(ranks: Ranks, member: "_Member", message: Message) -> torch.Tensor | None:
    """Work, and say that it is done or what went wrong. What is to be added to the others' sums comes back."""
    try:
        numbers, to_add, seconds = member.work(message)
    except Exception as trouble:
        if ranks.is_broken:
            raise
        ranks.answer(trouble=_in_words(trouble))
        return None
    ranks.answer(numbers, seconds=seconds)
    return to_add


def _in_words(trouble: Exception) -> str:
    """What the leader may show. What a machine lacks is said; of a bug only its kind, since its message may name users."""
    if isinstance(trouble, UnheardError):
        return str(trouble)
    kind = type(trouble).__name__
    is_machine = isinstance(trouble, OSError | MemoryError | RuntimeError)
    return f"{kind}: {trouble}" if is_machine else f"{kind}, which is a bug: run it without --processes to see where."


@dataclass
class _Member:
    """One rank's model, engine and stores, as the leader asked for them last."""

    ranks: Ranks
    jobs: Mapping[str, Job]
    model: LanguageModel | None = None
    engine: Engine | None = None
    stores: Stores | None = None
    timeout: float = 600.0

    def connect(self) -> None:
        assert self.engine is not None
        self.ranks.connect(self.engine.device, self.timeout)

    def work(self, message: Message) -> tuple[np.ndarray | None, torch.Tensor | None, float]:
        """Numbers to answer with, a sum to add to the others', and how long it took."""
        if message.job == "begin":
            self._begin(message.facts)
            return None, None, 0.0
        assert self.model is not None
        assert self.engine is not None
        assert self.stores is not None
        match message.job:
            case "look":
                return self.stores.look(tuple(message.facts["place"])), None, 0.0
            case "sum":
                return None, *sum_share(self.engine, self.stores, self.ranks, message, self.model.layout)
            case "spread":
                return work_on(self.ranks, message, self.jobs, self.model), None, 0.0
        raise InvalidValue(f"This rank does not know '{message.job}': give every rank the same version of unheard.")

    def _begin(self, facts: Mapping[str, Any]) -> None:
        choice = part_from_table(EngineChoice, facts["engine"], "engine")
        self.model = part_of_kind(MODELS, facts["model"], "model")
        self.engine = at_rank(choice, self.ranks).build(self.model)  # pyright: ignore[reportArgumentType]
        self.stores, self.timeout = Stores(self.ranks, choice.corpus_part), choice.rank_timeout
