"""A rank that is late, has ended or raised an error is named in the message, nothing hangs, and charges are kept."""

import builtins
import os
import signal
import time
from dataclasses import replace

import pytest

import unheard
from tests.engines.distributed.forks import LeaderFailed, on_ranks
from unheard.engines.choice import EngineChoice
from unheard.engines.distributed import engine as distributed
from unheard.errors import CorpusError
from unheard.privacy.ledger import Ledger
from unheard.training import worker
from unheard.training.checkpoint import newest_checkpoint
from unheard.training.loop import RunFolder

QUICK = EngineChoice(device="cpu", rank_timeout=1.0)


@pytest.fixture
def longer(run):
    return replace(run, training=unheard.Training(rounds=50, checkpoint_every=1000))


def every_other_error() -> list[type[Exception]]:
    """The exceptions of Python itself that are no errors of the machine, and that are made of one text."""
    kinds = {kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    others = (OSError, MemoryError, RuntimeError, BaseExceptionGroup, UnicodeDecodeError, UnicodeEncodeError)
    others += (UnicodeTranslateError, Warning)
    return sorted((kind for kind in kinds if not issubclass(kind, others)), key=lambda kind: kind.__name__)


def at_round(monkeypatch, number: int, rank: int, what) -> None:
    """Call a function on one rank (a fork of this process) when it receives its share of a round."""
    real, asked = distributed._sum_here, [0]

    def share(engine, stores, *rest):
        asked[0] += 1
        if stores.ranks.rank == rank and asked[0] == number:
            what()
        return real(engine, stores, *rest)

    monkeypatch.setattr(distributed, "_sum_here", share)


def trained(run, folder, engine=QUICK):
    def lead(ranks):
        list(unheard.train(run, folder, engine=engine, ranks=ranks))

    return lead


def charged_and_saved(folder) -> tuple[int, int]:
    return len(Ledger.read(folder / "ledger.jsonl")), newest_checkpoint(RunFolder(folder)).state.round


@pytest.mark.system
def test_a_slow_rank_is_named_after_the_time_it_was_given(longer, tmp_path, monkeypatch):
    at_round(monkeypatch, 3, 2, lambda: time.sleep(60))
    began = time.monotonic()
    with pytest.raises(LeaderFailed, match="RankError: Rank 2 of 3 did not answer within 1 s"):
        on_ranks(3, trained(longer, tmp_path / "r"))
    assert time.monotonic() - began < 50
    assert charged_and_saved(tmp_path / "r") == (3, 2)  # the lost round is charged, and earlier rounds are kept


def test_a_rank_that_stops_before_it_receives_a_request_is_named(longer, tmp_path, monkeypatch):
    real, rounds = distributed.DistributedEngine._assign, [0]

    def assign(self, *args):
        rounds[0] += 1
        if rounds[0] == 2:  # the leader, between rounds, while rank 1 waits for work
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGSTOP)
        return real(self, *args)

    def follow(ranks):
        (tmp_path / "pid").write_text(str(os.getpid()))
        worker.serve(ranks)

    monkeypatch.setattr(distributed.DistributedEngine, "_assign", assign)
    with pytest.raises(LeaderFailed, match="Rank 1 of 2 did not answer within 1 s"):
        on_ranks(2, trained(longer, tmp_path / "r"), follow, patience=30)
    assert charged_and_saved(tmp_path / "r") == (2, 1)


def test_a_rank_that_was_killed_is_named(longer, tmp_path, monkeypatch):
    at_round(monkeypatch, 2, 1, lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(LeaderFailed, match="RankError: Rank 1 of 3 is gone"):
        on_ranks(3, trained(longer, tmp_path / "r"))
    assert charged_and_saved(tmp_path / "r") == (2, 1)


def test_the_leader_reports_an_error_of_a_rank(longer, tmp_path, monkeypatch):
    def damage() -> None:
        raise CorpusError("its disk is gone.")

    at_round(monkeypatch, 2, 1, damage)
    with pytest.raises(LeaderFailed, match=r"RankError: Rank 1 of 2: its disk is gone\."):
        on_ranks(2, trained(longer, tmp_path / "r", EngineChoice(device="cpu", rank_timeout=20)))
    assert charged_and_saved(tmp_path / "r") == (2, 1)


def test_a_bug_on_a_rank_is_reported_by_its_type_without_numbers(longer, tmp_path, monkeypatch):
    def bug() -> None:
        raise IndexError("index 123456 is out of bounds")

    at_round(monkeypatch, 2, 1, bug)
    with pytest.raises(LeaderFailed, match=r"RankError: Rank 1 of 2: IndexError") as told:
        on_ranks(2, trained(longer, tmp_path / "r", EngineChoice(device="cpu", rank_timeout=20)))
    assert "123456" not in str(told.value)


@pytest.mark.parametrize("kind", every_other_error())
def test_of_an_error_that_is_neither_ours_nor_the_machines_a_rank_sends_its_type_alone(kind):
    """The words of such an error may quote what a user wrote."""
    words = worker._message_for_leader(kind("secret"))
    assert "secret" not in words
    assert words.startswith(kind.__name__)


def test_of_an_error_of_ours_or_of_the_machine_a_rank_sends_the_words():
    for error in (CorpusError("its disk is gone."), OSError("its disk is gone."), MemoryError("its disk is gone.")):
        assert "its disk is gone." in worker._message_for_leader(error)


def test_a_device_that_a_rank_does_not_have_is_refused_by_name(longer, tmp_path, monkeypatch):
    real = worker.choice_at_rank

    def at_rank(choice, ranks):
        if ranks.rank == 1:
            raise unheard.errors.InvalidValue("no such device.")
        return real(choice, ranks)

    monkeypatch.setattr(worker, "choice_at_rank", at_rank)
    with pytest.raises(LeaderFailed, match="Rank 1 of 2: no such device"):
        on_ranks(2, trained(longer, tmp_path / "r"))
    assert not (tmp_path / "r").exists()


def test_ranks_print_nothing_about_users(model, plan):
    from unheard.engines.distributed.process_group import Message, Reply

    said = repr(Message("sum", {"counts": [123456789]}, [123456789])) + repr(Reply([123456789], 7.25))
    assert "123456789" not in said
    assert "7.25" not in said


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf")])
def test_a_timeout_must_be_above_zero(timeout):
    with pytest.raises(unheard.errors.InvalidValue, match="rank_timeout"):
        EngineChoice(rank_timeout=timeout)


@pytest.mark.system
def test_a_leader_that_is_slower_than_the_timeout_is_waited_for(longer, tmp_path, monkeypatch):
    """Other ranks may be early. They wait for a message of the leader, not in the sum."""
    at_round(monkeypatch, 2, 0, lambda: time.sleep(2.5))
    short = replace(longer, training=replace(longer.training, rounds=3))
    on_ranks(3, trained(short, tmp_path / "r"))
    assert charged_and_saved(tmp_path / "r") == (3, 3)
