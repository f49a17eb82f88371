"""The exceptions that Unheard raises. Each message says what was asked, which rule it breaks, and what to do.

    UnheardError
    |-- ConfigError            a run file, a part or a command-line value is not usable as given
    |   |-- UnknownKey         a key or kind does not exist; the message names the nearest known one
    |   `-- InvalidValue       a value has the wrong type or is outside the allowed range
    |-- PrivacyError           the guarantee does not hold, or cannot be shown to hold
    |   |-- UnprovenCombination   a combination of parts has no proof of privacy: always an error, never a warning
    |   |-- BudgetExceeded     the next round would cost more than the declared budget
    |   |-- LedgerError        a ledger is edited, reordered, shortened or unreadable, or cannot be written
    |   `-- AccountingError    an accountant cannot give a valid bound for these events
    |-- CorpusError            text or a token store cannot be read or written
    |   |-- CorpusMissing      there is no corpus at the path
    |   |-- CorpusCorrupt      the files of a store do not agree with each other
    |   `-- InputError         raw input cannot be used: a column is missing, the format is unknown, ...
    |-- RunFolderError         a run folder cannot be used
    |   |-- RunFolderExists    the path of a new run is not an empty folder
    |   |-- RunFolderInUse     another process is training in the folder
    |   |-- RunFolderMissing   the folder holds no run, or a required file is missing
    |   `-- CheckpointCorrupt  a checkpoint or model file is damaged
    |-- NodeError              a node or the server of a federated run fails, or breaks the protocol
    |-- RankError              one of several processes that train together is late, lost or has failed
    `-- ModelError             a model does not fit its parameters, its vocabulary or the engine
        `-- CodeNotTrusted     the class of a model is code of another author, which `verify` does not import

`NoiseWarning` is the only warning: `train` emits it before the first round if the noise will dominate the updates.

The command line prints the message and exits with status 2; a traceback is a bug. Catch `UnheardError` to handle all
errors, or a subclass to handle one kind:

    from unheard.errors import BudgetExceeded

    try:
        for report in unheard.train(run, "runs/first"):
            ...
    except BudgetExceeded as error:
        print(error)  # the model of the last completed round is in the run folder
"""


class NoiseWarning(UserWarning):
    """The noise of each round will dominate the updates, so the model will be useless. The message says what to change."""


class UnheardError(Exception):
    """The base class of all errors that Unheard raises on purpose, with a message that says what to do."""


class ConfigError(UnheardError):
    """A run file, a part or a command-line value is not usable as given."""


class UnknownKey(ConfigError):
    """A key or kind does not exist. The message names the nearest known one."""


class InvalidValue(ConfigError):
    """A value has the wrong type or is outside the range that the part allows."""


class PrivacyError(UnheardError):
    """The privacy guarantee does not hold, or cannot be shown to hold."""


class UnprovenCombination(PrivacyError):
    """The parts are valid one by one, but there is no proof of privacy for their combination."""


class BudgetExceeded(PrivacyError):
    """One more round would exceed the budget of the run or of all runs on its users, or correlated noise has ended.

    The round was not charged, and no cohort was drawn.
    """


class LedgerError(PrivacyError):
    """A ledger is edited, reordered, shortened, unreadable, or cannot be written."""


class AccountingError(PrivacyError):
    """An accountant cannot give a valid bound for these events."""


class CorpusError(UnheardError):
    """Text or a token store cannot be read or written."""


class CorpusMissing(CorpusError):
    """There is no corpus at the path."""


class CorpusCorrupt(CorpusError):
    """The files of a token store do not agree with each other."""


class InputError(CorpusError):
    """Raw input cannot be used: a column is missing, the format is unknown, or the file is incomplete."""


class RunFolderError(UnheardError):
    """A run folder cannot be used."""


class RunFolderExists(RunFolderError):
    """The path of a new run exists and is not an empty folder."""


class RunFolderInUse(RunFolderError):
    """Another process is training in the run folder."""


class RunFolderMissing(RunFolderError):
    """The folder holds no run, or a required file of the run is missing."""


class CheckpointCorrupt(RunFolderError):
    """A checkpoint or model file is damaged: its content is not what Unheard wrote."""


class RankError(UnheardError):
    """One of several processes that train together is late, lost or has failed; the message names it."""


class NodeError(UnheardError):
    """A node or the server of a federated run fails, is unreachable, or sends a message that the protocol forbids."""


class ModelError(UnheardError):
    """A model does not fit its parameters, its vocabulary or the engine."""


class CodeNotTrusted(ModelError):
    """A run file names a model class that is not part of Unheard. `verify` does not import it, as importing runs its code."""
