"""The command line on several processes: torch's launcher starts them, one of them is killed, and the run continues.

Each start imports torch in every process, so there are few of them here. UNHEARD_KILLS=10 kills ten times.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from safetensors import safe_open

import unheard
from unheard.cli.processes import _launch, _raise_first_failure
from unheard.errors import RankError
from unheard.privacy.ledger import Ledger
from unheard.training.checkpoint import load_model
from unheard.training.run import run_toml

pytestmark = pytest.mark.system

KILLS = int(os.environ.get("UNHEARD_KILLS", "1"))
ALONE = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
ENV = {**ALONE, "OMP_NUM_THREADS": "1"}


def start(*words: object, module: str = "unheard") -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV
    )


def ended(process: subprocess.Popen, patience: float = 120) -> tuple[int, str]:
    said = process.communicate(timeout=patience)
    return process.returncode, (said[0] + said[1]).decode()


def ranks_of(launcher: int) -> dict[int, int]:
    """Return the process id of each rank that a launcher has started. Processes may start or end meanwhile."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", (place / "environ").read_bytes())
            if parent == launcher and rank:
                found[int(rank.group(1))] = int(place.name)
    return found


def listened_at(processes) -> set[str]:
    """Return the addresses, as in /proc, on which any of these processes listens."""
    mine = set()
    for one in (one for pid in processes for one in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(OSError):  # files may be opened or closed meanwhile
            mine.add(os.readlink(one).removeprefix("socket:[").removesuffix("]"))
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in mine}


def charged(folder: Path) -> int:
    return len(Ledger.read(folder / "ledger.jsonl")) if (folder / "ledger.jsonl").exists() else 0


def unsaved(folder: Path) -> int:
    """Return the number of rounds charged since the newest model was saved. They are lost if a rank is killed now."""
    return Ledger.read(folder / "ledger.jsonl").entries[-1].round + 1 - released_round(folder)


def released_round(folder: Path) -> int:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        found = re.search(r'"round": (\d+)', file.metadata()["unheard"])
    assert found
    return int(found.group(1))


def until(condition, process: subprocess.Popen, patience: float = 120) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.005)


def test_a_rank_killed_at_any_moment_is_started_again_and_the_ledger_never_under_counts(run, tmp_path):
    rng, folder = random.Random(8), tmp_path / "r"
    long = replace(run, training=replace(run.training, rounds=100_000, checkpoint_every=6))
    (tmp_path / "run.toml").write_text(run_toml(long))
    going = start(
        *("train", tmp_path / "run.toml", "--out", folder, "--processes", 2, "--max-restarts", KILLS),
        *("--rank-timeout", 60, "--device", "cpu"),
    )
    seen, models, before = 0, [0], {}
    try:
        for kill in range(KILLS):
            until(lambda seen=seen: charged(folder) > seen + 1, going)
            time.sleep(rng.random() * 0.3)
            before = ranks_of(going.pid)
            assert sorted(before) == [0, 1]
            # Sums that ranks send have no noise yet: other machines must not be able to read or redirect them.
            assert listened_at([going.pid, *before.values()]) == {"0100007F"}
            until(lambda: unsaved(folder) in (2, 3), going)  # so that rounds are lost
            os.kill(before[kill % 2], signal.SIGKILL)
            until(lambda old=set(before.values()): not old & set(ranks_of(going.pid).values()), going)
            seen = charged(folder)
            models.append(released_round(folder))
            assert seen >= models[-1] >= models[-2]
            rounds = [entry.round for entry in Ledger.read(folder / "ledger.jsonl").entries]
            assert set(range(models[-1])) <= set(rounds)  # every round of a released model was paid for
        until(lambda: charged(folder) > seen + 2, going)  # and the run continues
    finally:
        last = ranks_of(going.pid)
        going.send_signal(signal.SIGTERM)
        said = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            said = ended(going, 40)[1]
        for process in (going.pid, *last.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    assert "Stopped. What was done is saved" in " ".join(said.split())
    rounds = [entry.round for entry in Ledger.read(folder / "ledger.jsonl").entries]
    assert len(rounds) >= released_round(folder)
    assert len(rounds) > len(set(rounds))  # lost rounds were repeated and charged again
    reports = list(unheard.resume(folder, rounds=released_round(folder) + 2))
    assert reports[-1].round == released_round(folder)


def test_torchrun_makes_the_run_that_one_process_makes(run, model, tmp_path):
    seeded = replace(run, training=unheard.Training(rounds=2, reproducible_seed=2))
    (tmp_path / "run.toml").write_text(run_toml(seeded))
    words = ("train", tmp_path / "run.toml", "--device", "cpu", "--out")
    launched = ("--standalone", "--nproc-per-node", 2, "-m", "unheard")
    going = start(*launched, *words, tmp_path / "two", module="torch.distributed.run")
    list(unheard.train(seeded, tmp_path / "one", engine=unheard.EngineChoice(device="cpu")))
    status, said = ended(going)
    assert status == 0, said
    assert said.count("Running bound") == 1  # only one rank prints
    one, two = (load_model(tmp_path / name / "model.safetensors", model) for name in ("one", "two"))
    assert torch.equal(one, two)
    one, two = (Ledger.read(tmp_path / name / "ledger.jsonl").events for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(
    ("codes", "status"), [({0: 2}, 2), ({0: 2, 1: -9}, 2), ({0: 130}, 130), ({1: -9}, None), ({0: -15, 1: 1}, None)]
)
def test_a_launcher_ends_as_its_leader_did_or_names_who_died(codes, status):
    failures = {rank: SimpleNamespace(exitcode=code, timestamp=-rank) for rank, code in codes.items()}
    with pytest.raises(typer.Exit if status else RankError) as found:
        _raise_first_failure(failures)
    if isinstance(found.value, typer.Exit):
        assert found.value.exit_code == status
    else:
        assert "Rank 1 ended" in str(found.value)


@pytest.mark.parametrize("verb", ["train", "resume", "sweep", "evaluate", "audit"])
def test_the_short_form_is_there(verb):
    from typer.testing import CliRunner

    from unheard.cli.main import app

    assert "--processes" in CliRunner(env={"COLUMNS": "200"}).invoke(app, [verb, "--help"]).output


@pytest.mark.parametrize("asked", [None, "eth7"])
def test_processes_of_one_machine_do_not_send_their_sums_over_its_network(monkeypatch, asked):
    """By default Gloo binds the address of the host name, which other machines may reach. The sums have no noise yet."""
    seen = []
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", asked or "")  # so that monkeypatch restores it
    if not asked:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(
        "torch.distributed.launcher.api.elastic_launch",
        lambda config, entry: lambda *words: seen.append(os.environ.get("GLOO_SOCKET_IFNAME")),
    )
    monkeypatch.setattr("logging.disable", lambda level: None)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")  # likewise
    _launch(2, 0)
    assert "UNHEARD_MEETING_PLACE" not in os.environ
    assert seen == [asked or "lo"]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_ranks_end_with_a_launcher_that_is_killed_and_charge_nothing_more(run, tmp_path):
    seeded = replace(run, training=unheard.Training(rounds=100_000, reproducible_seed=2))
    (tmp_path / "run.toml").write_text(run_toml(seeded))
    ledger, ranks = tmp_path / "r" / "ledger.jsonl", {}
    launcher = start("train", tmp_path / "run.toml", "--out", tmp_path / "r", "--processes", 2)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and not (ledger.exists() and len(Ledger.read(ledger)) > 2):
            ranks = ranks_of(launcher.pid) or ranks
            time.sleep(0.2)
        assert len(ranks) == 2
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        until = time.monotonic() + 10
        while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in ranks.values()):
            time.sleep(0.1)
        charged = len(Ledger.read(ledger))
        time.sleep(2)
        assert len(Ledger.read(ledger)) == charged
        assert not [pid for pid in ranks.values() if Path(f"/proc/{pid}").exists()]
    finally:
        for pid in (launcher.pid, *ranks.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.communicate()  # closes the pipes
