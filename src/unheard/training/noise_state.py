"""The secret state of a run with correlated noise: the keys of its attempts and the noise of earlier attempts, on disk.

The noise of a round is computed from the noise of earlier rounds. Anyone who knows this state can subtract the noise
from the released models, so it is as secret as the users' text. It lies in `noise/` of the run folder, is readable by
its owner alone, and is deleted when the run is complete:

    noise/keys.jsonl    the key of the users' groups, and the key of each attempt since the history was saved
    noise/history       the noise of the last rounds (banded) or the buffers (BLT), float64, saved with checkpoints

An attempt first writes its key, then charges the population's ledger, then the run's ledger, and only then draws the
cohort. If the process is killed at any moment, each charged attempt therefore has its key, and its noise can be
recomputed exactly. A key without a charge has not been used and is dropped. No attempt is repeated: a round that runs
again has the next index, a new key and another group of users.

    state = open_noise_state(run, folder, ledger, streams, device)
    turn = state.begin_attempt()                                        # the key is on disk
    ledger.charge(plan.event(turn.index), round)
    normals = state.normals()

A "mechanism" is one sequence of attempts with correlated noise. A state that is missing, damaged or of another run
raises an error. If it is lost, `unheard resume --new-noise` begins a new mechanism, which is charged from its first
round. The proof is in docs/correlated-noise-proof.md.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unheard import storage
from unheard.errors import BudgetExceeded, CheckpointCorrupt, LedgerError, RunFolderError
from unheard.mechanism.correlated import CorrelatedNormals, NoiseHistory
from unheard.mechanism.noise import NORMALS_PER_BLOCK, standard_normals
from unheard.mechanism.sampling import Turn
from unheard.privacy.events import CorrelatedGaussian
from unheard.privacy.ledger import REPRODUCIBLE, Entry
from unheard.privacy.matrix_factorization import Factorisation
from unheard.privacy.run_ledger import JointLedger
from unheard.randomness import Streams, generator_from_key
from unheard.run_folder import RunFolder
from unheard.training.run import Run

FORMAT = "unheard-noise-1"
LARGE_HISTORY = 128 * 2**20
"""The size in bytes above which a history is not saved with every checkpoint. The noise since the last save can be
recomputed from the keys."""
MOST_REPLAYED = 200
"""The number of attempts after which a large history is saved, so that no more than these must be recomputed."""
CURE = (
    "Put back the run's own copy. If it is lost, resume the run with --new-noise (new_noise=True in Python): a new one "
    "begins and is charged from its first round."
)


@dataclass(frozen=True, kw_only=True)
class KeyRecord:
    """The key of one attempt. Secret.

    Attributes:
        index: The number of the attempt in its mechanism, from 0.
        key: The key from which the standard normals of the attempt are drawn.
    """

    index: int
    key: bytes = field(repr=False)

    @property
    def once(self) -> str:
        """The random text of the attempt's charge in the population's ledger: a hash, which does not reveal the key."""
        return hashlib.sha256(b"charge of " + self.key).hexdigest()[:16]


class NoiseState:
    """The secret state of one mechanism: its keys on disk, and its earlier noise in memory and on disk.

    Args:
        folder: The folder `noise` of the run.
        ledger: The ledger of the run.
        streams: The source of keys.
        history: The noise of the attempts so far.
        first: The position of the mechanism's first charge in the run's ledger.
        groups_key: The key that assigns users to groups.
        num_parameters: P, the number of parameters.
        device: Where the noise is used.
    """

    def __init__(
        self,
        folder: Path,
        ledger: JointLedger,
        streams: Streams,
        history: NoiseHistory,
        first: int,
        groups_key: bytes,
        num_parameters: int,
        device: torch.device,
    ) -> None:
        self._folder, self._ledger, self._streams = folder, ledger, streams
        self._num_parameters, self._device = num_parameters, device
        self._history, self._first, self._groups_key = history, first, groups_key
        self._records: list[KeyRecord] = []
        self._saved_index = history.index
        self._size: int | None = None  # bytes of keys.jsonl; None before the first key is written
        self.repeats: str | None = None
        """The text `once` of the next attempt's charge, if the population's ledger already holds it because the process
        was killed. The attempt may then be charged to the population a second time."""

    @property
    def index(self) -> int:
        """The index of the next attempt: the number of attempts of this mechanism that were charged."""
        # DP: counted from the ledger, which only grows: no index is ever used twice.
        return len(self._ledger) - self._first

    @property
    def once(self) -> str | None:
        """The random text of the charge of the attempt that was begun last; None for a seeded run, whose keys repeat."""
        return None if self._ledger.run.startswith(REPRODUCIBLE) else self._records[-1].once

    def begin_attempt(self) -> Turn:
        """Draw the key of the next attempt and write it to disk. Call this before the attempt is charged.

        Returns:
            The index of the attempt and the key of the users' groups, for sampling.

        Raises:
            BudgetExceeded: A BLT mechanism has no attempts left.
            RunFolderError: The key could not be written. The attempt must not be charged.
        """
        index, matrix = self.index, self._history.factorisation
        # DP: the sensitivity of BLT noise is for T rounds; one more would not be covered.
        if matrix.strategy == "blt" and index >= matrix.rounds:
            raise BudgetExceeded(
                f"All {matrix.rounds} attempts of this run's correlated noise are used (rounds done again after a stop count "
                "too). Keep this model, or begin a new mechanism, which is charged in full: `unheard resume` with --rounds."
            )
        record = KeyRecord(index=index, key=self._streams.noise_key(len(self._ledger)))
        line = _key_line(record)
        try:
            # DP: on disk before the charge and before the cohort: a charged attempt whose noise is unknown cannot be.
            if self._size is None:
                self._begin_file(line)
            else:
                storage.append(self._keys, line, expected_size=self._size)
                self._size += len(line)
        except OSError as error:
            raise RunFolderError(
                f"Cannot write {self._keys}: {error.strerror}. Nothing was charged. Free some space, then resume the run."
            ) from None
        self._records.append(record)
        return Turn(index=index, groups_key=self._groups_key)

    def normals(self) -> CorrelatedNormals:
        """Return the noise of the attempt that was charged last. Its standard normals are drawn on other threads.

        Raises:
            LedgerError: The attempt is not charged yet, or its noise was requested before.
        """
        self.repeats = None
        record = self._records[-1]
        # DP: the key belongs to this attempt, and the history ends just before it.
        if record.index != self.index - 1 or self._history.index != record.index:
            raise LedgerError("The noise of this attempt was requested before its charge, or twice.")
        return CorrelatedNormals(record.key, self._history, self._num_parameters, self._device)

    def save(self, *, is_last: bool = True) -> None:
        """Save the history, and delete the keys that it makes unnecessary.

        Args:
            is_last: Whether training stops here. If not, a history above 128 MiB is saved only every 200 attempts.

        Raises:
            RunFolderError: A file could not be written.
        """
        done = self._history.index
        rows_RP = self._history.rows
        is_large = rows_RP.numel() * rows_RP.element_size() > LARGE_HISTORY
        if done == self._saved_index or (is_large and not is_last and done - self._saved_index < MOST_REPLAYED):
            return
        facts = {"format": FORMAT, "binding": self._binding, "index": done, "shape": list(rows_RP.shape)}
        try:
            _write_history(self._history_file, facts, rows_RP)
            # DP: keys that are no longer needed would only help someone who steals the file.
            kept = [record for record in self._records if record.index >= done]
            self._rewrite(kept)
        except OSError as error:
            raise RunFolderError(
                f"Cannot write {self._folder}: {error.strerror}. The noise saved before is unchanged. Free some space, "
                "then resume the run."
            ) from None
        self._records, self._saved_index = kept, done

    def load(self, charged: int) -> None:
        """Read keys and history from disk, and recompute the noise of all charged attempts.

        Args:
            charged: The number of attempts that the ledger holds for this mechanism.

        Raises:
            CheckpointCorrupt: A file is damaged, readable by others, or belongs to another mechanism.
            LedgerError: A copy of the run folder was trained further.
        """
        header, records = self._read_keys()
        self._groups_key = bytes.fromhex(header["groups_key"])
        start = self._read_history()
        wanted = {record.index: record for record in records}  # an index can have several keys: the last was charged
        wanted.pop(charged, None)
        # DP: every attempt that was charged must be replayed: noise that forgets one of them is not C^-1 z.
        if not set(range(start, charged)) <= wanted.keys() or any(index >= charged for index in wanted):
            raise self._corrupt(self._keys, "does not hold the key of each attempt that was charged")
        self._records = [wanted[index] for index in range(start, charged)]
        for record in self._records:
            normals_P = standard_normals(generator_from_key(record.key), self._num_parameters, self._device)
            self._history.next(normals_P)
        self._saved_index = start
        uncharged = [record for record in records if record.index == charged]
        self._check_population(uncharged)
        # Kept until the next attempt is charged: one of them may explain a charge that the run's ledger does not hold.
        self._records += uncharged

    def _check_population(self, uncharged: list[KeyRecord]) -> None:
        """Check that the population's ledger holds no charge of this run that came from a copy of the run folder.

        The population is charged first, so after a kill its ledger may hold one charge more than the run's. Sets
        `repeats` in that case.

        Args:
            uncharged: The keys of the next attempt, which the run's ledger does not hold yet.

        Raises:
            LedgerError: A copy of the run folder was trained further.
        """
        charged_run = self._ledger.population.runs.get(self._ledger.run)
        if (
            charged_run is None
            or charged_run.num_charged <= len(self._ledger)
            or self._ledger.run.startswith(REPRODUCIBLE)
        ):
            return
        # DP: the charge names the key that was written before it; a charge of another key is of a copy of the run, which
        # used this history.
        if charged_run.last_once not in [record.once for record in uncharged]:
            raise LedgerError(
                f"{self._ledger.population.path} holds a charge of this run that is not in this folder: a copy of the "
                "folder was trained further. Two copies must not share one history of noise. Continue with the other "
                "copy, or resume this one with --new-noise: a new mechanism begins and is charged from its first round."
            )
        self.repeats = charged_run.last_once

    @property
    def _keys(self) -> Path:
        return self._folder / "keys.jsonl"

    @property
    def _history_file(self) -> Path:
        return self._folder / "history"

    @property
    def _binding(self) -> str:
        """A digest that identifies the mechanism, so that files of another mechanism are recognised.

        It covers the run, the position of the first charge, all charges before it, the matrix C, the number of
        parameters, and how normals are drawn from a key.
        """
        entries = self._ledger.entries
        before = entries[self._first - 1].hash if self._first else ""
        matrix = json.dumps(self._history.factorisation.to_record(), sort_keys=True)
        parts = [self._ledger.run, str(self._first), before, matrix, str(self._num_parameters), _draw_digest()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _header_line(self) -> bytes:
        header = {"format": FORMAT, "binding": self._binding, "groups_key": self._groups_key.hex()}
        return _sealed(header)

    def _begin_file(self, first_key: bytes) -> None:
        """Delete the files of an older mechanism and begin keys.jsonl with its header and the first key."""
        storage.delete_folder(self._folder)
        self._folder.mkdir(mode=0o700)
        content = self._header_line() + first_key
        storage.replace_file(self._keys, content, owner_only=True)
        storage.sync_folder(self._folder.parent)
        self._size = len(content)

    def _rewrite(self, records: list[KeyRecord]) -> None:
        content = self._header_line() + b"".join(map(_key_line, records))
        storage.replace_file(self._keys, content, owner_only=True)
        self._size = len(content)

    def _read_keys(self) -> tuple[dict[str, Any], list[KeyRecord]]:
        """Read the header and the keys, and remove an incomplete last line from the file.

        Raises:
            CheckpointCorrupt: The file is damaged, or belongs to another mechanism.
        """
        content = self._read_secret(self._keys)
        lines = content.split(b"\n")
        try:
            header = _opened(lines[0])
            # The process was killed while it wrote an incomplete last line, so that attempt was not charged.
            records = [_record(_opened(line)) for line in lines[1:-1]]
            bytes.fromhex(header["groups_key"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise self._corrupt(self._keys, "is damaged") from None
        # DP: keys of another run, of another mechanism or of another version would give noise that was never added.
        if header.get("format") != FORMAT or header.get("binding") != self._binding:
            raise self._corrupt(
                self._keys, "belongs to another run or mechanism, or to a version that draws other numbers"
            )
        self._size = len(content) - len(lines[-1])
        if lines[-1]:
            storage.truncate(self._keys, self._size, expected_size=len(content))
        return header, records

    def _read_history(self) -> int:
        """Read the saved history, if there is one, and return the number of attempts that it covers.

        Raises:
            CheckpointCorrupt: The file is damaged, or belongs to another mechanism.
        """
        if not os.path.lexists(self._history_file):
            return 0
        facts, rows_RP = _parse_history(self._read_secret(self._history_file))
        if rows_RP is None or facts.get("binding") != self._binding:
            raise self._corrupt(self._history_file, "is damaged, or belongs to another run or mechanism")
        matrix, index = self._history.factorisation, int(facts["index"])
        try:
            self._history = NoiseHistory(
                matrix, self._num_parameters, self._device, index=index, rows_RP=torch.from_numpy(rows_RP)
            )
        except ValueError:
            raise self._corrupt(self._history_file, "belongs to another model") from None
        return index

    def _read_secret(self, path: Path) -> bytes:
        """Read a file that only its owner may read.

        Raises:
            CheckpointCorrupt: The file cannot be read, or its permissions allow others to read it.
        """
        try:
            mode = path.stat().st_mode
            content = path.read_bytes()
        except OSError as error:
            raise self._corrupt(path, f"cannot be read ({error.strerror})") from None
        # DP: past noise is as secret as the text; a file that others could read may have been read.
        if os.name == "posix" and mode & 0o077:
            raise CheckpointCorrupt(
                f"{path} can be read by others than its owner, and anyone who reads it can subtract the noise of this "
                f"run. Find out who has read it; then `chmod 600 {path}`, or resume the run with --new-noise: a new "
                "mechanism begins and is charged from its first round."
            )
        return content

    def _corrupt(self, path: Path, what: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{path} {what}. {CURE}")


def open_noise_state(
    run: Run,
    folder: RunFolder,
    ledger: JointLedger,
    streams: Streams,
    device: torch.device,
    *,
    may_renew: bool = False,
    is_new: bool = False,
) -> NoiseState:
    """Open the noise state of a run with correlated noise, or begin its first mechanism. Charges nothing.

    Args:
        run: The run as configured.
        folder: The run folder, locked.
        ledger: The ledgers of the run and its population, open for charging.
        streams: The sources of randomness of the run.
        device: Where the noise is used.
        may_renew: Whether to begin a new mechanism if the current one has no attempts left.
        is_new: Whether to begin a new mechanism in any case. The state of the current one is not read, and is deleted
            with the first attempt.

    Raises:
        CheckpointCorrupt: The state is missing or damaged, or belongs to another run.
        LedgerError: The ledger's header has no coefficients, or a copy of the folder was trained further.
    """
    # DP: use the coefficients from the ledger's header, because the charges were computed for them. Optimising again on
    # another machine could give others.
    matrix = Factorisation.from_record(ledger.facts.get("correlated_noise"))
    parameters = run.model.layout.total
    first = mechanism_start(ledger.entries, int((ledger.facts.get("start") or {}).get("charges") or 0))
    charged = len(ledger) - first
    is_used = matrix.strategy == "blt" and charged >= matrix.rounds

    def state(begins_at: int) -> NoiseState:
        """Return the state of a mechanism whose first charge is at this position of the run's ledger; no noise yet."""
        history = NoiseHistory(matrix, parameters, device)
        key = streams.groups_key(begins_at)
        return NoiseState(folder.noise, ledger, streams, history, begins_at, key, parameters, device)

    # DP: a new mechanism has charges of its own, and nothing of the old one.
    if charged == 0 or is_new or (is_used and may_renew):
        return state(len(ledger))
    if is_used:
        return state(first)  # `begin_attempt` will raise BudgetExceeded
    # DP: missing noise is an error; a new mechanism costs the users more, so it begins only if it is asked for.
    if not os.path.lexists(folder.noise / "keys.jsonl"):
        raise CheckpointCorrupt(
            f"{folder.noise / 'keys.jsonl'} is missing, so the correlated noise of this run cannot continue (a complete run "
            f"has deleted it). {CURE}"
        )
    opened = state(first)
    opened.load(charged)
    return opened


def mechanism_start(entries: list[Entry], before: int) -> int:
    """Return the position of the newest mechanism's first charge, or the length of the ledger if none has begun.

    Args:
        entries: The charges of the run.
        before: How many of the charges were made before training.

    Raises:
        LedgerError: The charges from that position on are not attempts 0, 1, 2, ... of one mechanism.
    """
    position = len(entries)
    for position in range(len(entries) - 1, before - 1, -1):
        event = entries[position].event
        if isinstance(event, CorrelatedGaussian) and event.index == 0:
            break
    else:
        return len(entries)
    for number, entry in enumerate(entries[position:]):
        if not isinstance(entry.event, CorrelatedGaussian) or entry.event.index != number:
            raise LedgerError(
                f"The ledger's charges for correlated noise are not in order: line {position + number + 2} is not attempt "
                f"{number} of its mechanism. Put the right ledger back."
            )
    return position


def _key_line(record: KeyRecord) -> bytes:
    return _sealed({"index": record.index, "key": record.key.hex()})


def _record(values: dict[str, Any]) -> KeyRecord:
    return KeyRecord(index=int(values["index"]), key=bytes.fromhex(values["key"]))


def _sealed(values: dict[str, Any]) -> bytes:
    """Return a line of JSON with a checksum that detects accidental damage.

    The checksum is no protection against forgery: nobody but the owner can write this secret file.
    """
    text = json.dumps(values, sort_keys=True)
    return json.dumps({**values, "sum": hashlib.sha256(text.encode()).hexdigest()[:16]}).encode() + b"\n"


def _opened(line: bytes) -> dict[str, Any]:
    """Parse a line of JSON, verify its checksum, and return its values. Raise `ValueError` if the checksum is wrong."""
    values = json.loads(line)
    stated = values.pop("sum")
    if hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16] != stated:
        raise ValueError("checksum")
    return values


def _write_history(path: Path, facts: dict[str, Any], rows_RP: torch.Tensor) -> None:
    """Write the history of noise: a line of facts as JSON, the rows as float64, and a SHA-256 of both."""
    digest = hashlib.sha256()
    with storage.open_replacement(path, owner_only=True) as file:
        head = json.dumps(facts, sort_keys=True).encode() + b"\n"
        digest.update(head)
        file.write(head)
        for row_P in rows_RP:
            content = row_P.cpu().numpy().tobytes()
            digest.update(content)
            file.write(content)
        file.write(digest.digest())


def _parse_history(content: bytes) -> tuple[dict[str, Any], np.ndarray | None]:
    """Parse the content of a history file. Return its facts and its rows; the rows are None if the file is damaged."""
    end = content.find(b"\n")
    if end < 0 or hashlib.sha256(content[:-32]).digest() != content[-32:]:
        return {}, None
    facts = json.loads(content[:end])
    numbers = np.frombuffer(content[end + 1 : -32], dtype=np.float64)
    return facts, numbers.reshape(facts["shape"]).copy()


def _draw_digest() -> str:
    """Return a digest of the normals that a fixed key gives on this machine.

    It is part of the binding, because a version of a library that draws other normals must not continue with old keys.
    The draw extends into a second block, because another block size also gives other normals.
    """
    normals_P = standard_normals(generator_from_key(bytes(16)), NORMALS_PER_BLOCK + 1000, torch.device("cpu"))
    return hashlib.sha256(normals_P.numpy().tobytes()).hexdigest()[:16]
