"""The exceptions that Unheard raises. Each message says what was asked, which rule it breaks, and what to do.

    UnheardError
    |-- ConfigError            a run file, a part or a command-line value is not usable as given
    |   |-- UnknownKey         a key or kind that does not exist; the message names the nearest right one
    |   `-- InvalidValue       a value of the wrong type, or outside what the part allows
    |-- PrivacyError           the guarantee would not hold, or could not be shown to hold
    |   |-- UnprovenCombination   parts that each work, but have no proof together: always an error, never a warning
    |   |-- BudgetExceeded     the next round would cost more than the declared budget
    |   |-- LedgerError        a ledger that is edited, reordered, shortened or unreadable
    |   `-- AccountingError    an accountant cannot give a valid bound for these events
    |-- CorpusError            text or a token store cannot be read or written
    |   |-- CorpusMissing      there is no corpus at the path
    |   |-- CorpusCorrupt      a store whose files do not agree with each other
    |   `-- InputError         raw input that cannot be used (no such column, not a known format, ...)
    |-- RunFolderError         a run folder cannot be used
    |   |-- RunFolderExists    it already holds a run
    |   |-- RunFolderInUse     another process is training in it
    |   |-- RunFolderMissing   it holds no run
    |   `-- CheckpointCorrupt  a checkpoint or model file that does not read back as it was written
    |-- NodeError              a node of a federated run is late, lost, or sent what it was not asked for
    |-- RankError              one of several processes that train together is late, lost or has failed; it is named
    `-- ModelError             a model that does not fit its parameters, its vocabulary or the engine
        `-- CodeNotTrusted     a model's class would have to be imported, and this reader imports no code of others

`NoiseWarning` is the only warning: `train` emits it before the first round if the noise will dominate the updates.

The command line prints the message and exits with status 2; a traceback is a bug. Catch `UnheardError` to handle them
all:

    from unheard.errors import BudgetExceeded

    try:
        for report in unheard.train(run, "runs/first"):
            ...
    except BudgetExceeded as error:
        print(error)  # the model of the last completed round is in the run folder
"""


class NoiseWarning(UserWarning):
    """The noise of each round will dominate the updates: the model will be useless. The message names cures."""


class UnheardError(Exception):
    """The base class of all errors with a message that is meant for the user."""


class ConfigError(UnheardError):
    """A run file, a part or a command-line value is not usable as given."""


class UnknownKey(ConfigError):
    """A key or kind that does not exist; the message names the nearest right one."""


class InvalidValue(ConfigError):
    """A value of the wrong type, or outside what the part allows."""


class PrivacyError(UnheardError):
    """The guarantee would not hold, or could not be shown to hold."""


class UnprovenCombination(PrivacyError):
    """Parts that each work, but whose combination has no proof of privacy."""


class BudgetExceeded(PrivacyError):
    """The next round would cost more than the declared budget. Nothing of that round was drawn or charged."""


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
    """Raw input that cannot be used: no such column, an unknown format, a torn file."""


class RunFolderError(UnheardError):
    """A run folder cannot be used."""


class RunFolderExists(RunFolderError):
    """The folder for a new run already holds something."""


class RunFolderInUse(RunFolderError):
    """Another process is training in the run folder."""


class RunFolderMissing(RunFolderError):
    """The folder holds no run, or its run lacks a file that it cannot do without."""


class CheckpointCorrupt(RunFolderError):
    """A checkpoint or model file does not read back as it was written."""


class RankError(UnheardError):
    """One of several processes that train together is late, lost or has failed; the message names it."""


class NodeError(UnheardError):
    """A node of a federated run is late, lost, or sent what it was not asked for."""


class ModelError(UnheardError):
    """A model does not fit its parameters, its vocabulary or the engine."""


class CodeNotTrusted(ModelError):
    """A run file names a model class of the user's own code, and the reader does not import such code without permission."""
