"""How ranks find each other, also after some of them died: torchrun may keep one store for all attempts, with old addresses in it.

In: what torchrun put into the environment. Out: a store of this attempt's own, the rank, how many there are. Each process brings a
number that nobody else has; the leader answers it with the name of a fresh corner of the store, so that nothing old is ever read.
"""

import os
import secrets
import time
from datetime import timedelta

from torch.distributed import FileStore, PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from unheard.errors import RankError

MEETING_PLACE = "UNHEARD_MEETING_PLACE"
"""The variable by which `--processes` names a file to meet in; torchrun's processes meet at an address instead."""
PATIENCE = 600.0
"""Seconds for all to arrive: machines that start together import and compile at their own pace."""


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)


def was_restarted() -> bool:
    """Whether torchrun has started these processes again after one of them died."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def meet() -> tuple[Store, int, int]:
    """The store, this rank, the number of ranks."""
    if place := os.environ.get(MEETING_PLACE):
        store, rank, size = FileStore(place), int(os.environ["RANK"]), world_size()
    else:
        store, rank, size = next(iter(rendezvous("env://")))
    mine = secrets.token_hex(8)
    attempt = _welcome(store, mine, size) if rank == 0 else _arrive(store, mine, rank)
    return PrefixStore(f"unheard/{attempt}", store), rank, size


def _arrive(store: Store, mine: str, rank: int) -> str:
    store.set(f"unheard/hello/{rank}", mine)
    store.wait([f"unheard/welcome/{mine}"], timedelta(seconds=PATIENCE))
    attempt = store.get(f"unheard/welcome/{mine}").decode()
    store.set(f"unheard/{attempt}/here/{rank}", "yes")
    return attempt


def _welcome(store: Store, attempt: str, size: int) -> str:
    """Answer every number that is there, until each rank has said that it has heard: an earlier attempt's are silent."""
    missing, until = set(range(1, size)), time.monotonic() + PATIENCE
    while missing:
        if time.monotonic() > until:
            late = ", ".join(map(str, sorted(missing)[:8]))
            raise RankError(
                f"Rank {late} of {size} did not arrive within {PATIENCE:g} s. Look at its machine; start again."
            )
        for rank in sorted(missing):
            if store.check([f"unheard/{attempt}/here/{rank}"]):
                missing.discard(rank)
            elif store.check([f"unheard/hello/{rank}"]):
                store.set(f"unheard/welcome/{store.get(f'unheard/hello/{rank}').decode()}", attempt)
        time.sleep(0.005)
    return attempt
