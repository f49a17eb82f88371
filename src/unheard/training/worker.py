"""Training on several processes: builds the leader's engine, and runs the loop of the worker processes.

Rank 0, the leader, runs the training loop. Every other rank waits for the leader's requests, computes and answers. Only
the leader samples users, draws noise, writes the ledgers and checkpoints, and has the run folder
(docs/decisions/0050-one-leader.md). Every process runs the same program:

    ranks = ProcessGroup.join()                       # None for a process that is alone
    if ranks is None or ranks.is_leader:
        for report in train(run, out, ranks=ranks): ...
        ranks and ranks.shutdown()
    else:
        serve(ranks)

`build_on_ranks` builds the leader's engine. Messages between ranks: engines/distributed/process_group.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from unheard.config import part_from_table, part_of_kind, table_from_part
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed.engine import DistributedEngine, StoreReplicas, sum_share
from unheard.engines.distributed.parallel_map import BatchFunction, ParallelMap, map_on_ranks, map_share, sequential_map
from unheard.engines.distributed.process_group import Message, ProcessGroup
from unheard.engines.engine import Engine
from unheard.errors import InvalidValue, UnheardError
from unheard.evaluation.measures import score_batch
from unheard.evaluation.next_word import count_batch
from unheard.models.model import LanguageModel
from unheard.training.run import MODELS

JOBS: tuple[BatchFunction, ...] = (count_batch, score_batch)
"""The batch functions that a worker can compute by default, both for evaluation. `cli/processes.py` adds one for audits."""


def build_on_ranks(choice: EngineChoice, model: LanguageModel, ranks: ProcessGroup) -> DistributedEngine:
    """Build the leader's engine, which divides the work among all ranks, and make every other rank build its engine.

    Only the leader calls this function. The other ranks must be in `serve`.

    Args:
        choice: The kind of engine and the device. With device "cuda" each rank uses a different GPU.
        model: The model whose updates the engine sums.
        ranks: The processes that share the work.

    Raises:
        InvalidValue: The engine, the device or `corpus_part` cannot be used here.
        RankError: A rank does not answer.
    """
    model = model.pinned()  # adds the digest of the model's files, so that a rank with different files raises an error
    own_choice = choice_at_rank(choice, ranks)
    engine = table_from_part(replace(choice, device=own_choice.torch_device().type))
    facts = {"model": table_from_part(model, MODELS), "engine": engine}
    ranks.send_all("begin", facts)
    local = own_choice.build(model)
    ranks.replies()
    ranks.send_all("connect")
    ranks.connect(local.device, choice.rank_timeout)
    return DistributedEngine(local, ranks, StoreReplicas(ranks, choice.corpus_part), model.layout)


def choice_at_rank(choice: EngineChoice, ranks: ProcessGroup) -> EngineChoice:
    """Return the choice with this rank's GPU as the device; a choice of CPU is returned unchanged.

    Raises:
        InvalidValue: The choice names one GPU for all ranks, or the machine has fewer GPUs than ranks.
    """
    device = choice.torch_device()
    if device.type != "cuda":
        return choice
    if device.index is not None:
        raise InvalidValue(
            f"device = '{choice.device}' is one GPU, and every rank takes its own: use 'cuda' or 'auto'."
        )
    if torch.cuda.device_count() < ranks.local_size:
        raise InvalidValue(
            f"{ranks.local_size} ranks on a machine with {torch.cuda.device_count()} GPUs: start fewer, or use device "
            "= 'cpu'."
        )
    torch.cuda.set_device(ranks.local_rank)
    return replace(choice, device=f"cuda:{ranks.local_rank}")


def parallel_map_for(model: LanguageModel, ranks: ProcessGroup | None) -> ParallelMap:
    """Return the function that distributes the batches of an evaluation outside training. It computes on CPUs.

    Args:
        model: The model to evaluate.
        ranks: The processes that share the work; None for this process alone.

    Returns:
        A map over batches: in order on this process, or distributed over the ranks.
    """
    return (
        sequential_map
        if ranks is None
        else map_on_ranks(build_on_ranks(EngineChoice(device="cpu"), model, ranks).ranks)
    )


def serve(ranks: ProcessGroup, jobs: Sequence[BatchFunction] = JOBS) -> None:
    """Answer the leader's requests until the leader ends the session. Every rank except the leader calls this function.

    Args:
        ranks: The process group, from `ProcessGroup.join`.
        jobs: The functions over batches that the leader may ask for by name.

    Raises:
        RankError: The leader is gone.
    """
    worker = _Worker(ranks, {getattr(job, "__name__", ""): job for job in jobs})
    to_add = None
    while (message := ranks.receive()).kind != "end":
        if message.kind == "connect":
            worker.connect()
        elif message.kind == "add" and to_add is not None:
            # DP: a rank adds its sum and nothing else. It has no streams: the noise is one draw, by the leader.
            ranks.reduce_sum(to_add)
            to_add = None
        else:
            to_add = _answer(ranks, worker, message)


def _answer(ranks: ProcessGroup, worker: "_Worker", message: Message) -> torch.Tensor | None:
    """Compute the answer to a request and send it, or the error, to the leader.

    Returns:
        This rank's sum, which `serve` adds to the other ranks' sums at the next message "add"; None if there is none.
    """
    try:
        numbers, to_add, seconds = worker.compute(message)
    except Exception as error:
        if ranks.is_broken:
            raise
        ranks.reply(error=_message_for_leader(error))
        return None
    ranks.reply(numbers, seconds=seconds)
    return to_add


def _message_for_leader(error: Exception) -> str:
    """Return the text of an error for the leader to show.

    Errors of this package and of the machine keep their message. Of any other error only the type is sent, because its
    message may contain users' data.
    """
    if isinstance(error, UnheardError):
        return str(error)
    kind = type(error).__name__
    is_machine = isinstance(error, OSError | MemoryError | RuntimeError)
    return f"{kind}: {error}" if is_machine else f"{kind}, which is a bug: run it without --processes to see where."


@dataclass
class _Worker:
    """The model, the engine and the stores of one rank. The leader's request "begin" sets them."""

    ranks: ProcessGroup
    jobs: Mapping[str, BatchFunction]
    model: LanguageModel | None = None
    engine: Engine | None = None
    stores: StoreReplicas | None = None
    timeout: float = 600.0

    def connect(self) -> None:
        """Open the connections for sums. Needs the engine, because the backend depends on its device."""
        assert self.engine is not None
        self.ranks.connect(self.engine.device, self.timeout)

    def compute(self, message: Message) -> tuple[np.ndarray | None, torch.Tensor | None, float]:
        """Compute the answer to one request of the leader.

        Returns:
            The numbers of the answer, a sum to add to the other ranks' sums, and the seconds that the sum took. The
            first two are None where the request does not ask for them.
        """
        if message.kind == "begin":
            self._begin(message.fields)
            return None, None, 0.0
        assert self.model is not None
        assert self.engine is not None
        assert self.stores is not None
        match message.kind:
            case "fingerprint":
                return self.stores.fingerprint(tuple(message.fields["split"])), None, 0.0
            case "sum":
                return None, *sum_share(self.engine, self.stores, self.ranks, message, self.model.layout)
            case "map":
                return map_share(self.ranks, message, self.jobs, self.model), None, 0.0
        raise InvalidValue(f"This rank does not know '{message.kind}': give every rank the same version of unheard.")

    def _begin(self, facts: Mapping[str, Any]) -> None:
        """Build the model and the engine that the leader's request names, and prepare to open its stores."""
        choice = part_from_table(EngineChoice, facts["engine"], "engine")
        self.model = part_of_kind(MODELS, facts["model"], "model")
        self.engine = choice_at_rank(choice, self.ranks).build(self.model)  # pyright: ignore[reportArgumentType]
        self.stores, self.timeout = StoreReplicas(self.ranks, choice.corpus_part), choice.rank_timeout
