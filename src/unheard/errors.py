"""Every exception that Unheard raises on purpose: each says what was asked, which rule it breaks, and what to do.

    UnheardError
    |-- ConfigError            a run file, a part or a command-line value is not usable as given
    |   |-- UnknownKey         a key or kind that nothing answers to; the message names the nearest right one
    |   `-- InvalidValue       a value of the wrong type, or outside what the part allows
    |-- PrivacyError           the guarantee would not hold, or could not be shown to hold
    |   |-- UnprovenCombination   parts that each work, but have no proof together: refused, never warned about
    |   |-- BudgetExceeded     the next round would cost more than the declared budget
    |   |-- LedgerError        a ledger that is edited, reordered, shortened or unreadable
    |   `-- AccountingError    an accountant that cannot give a valid bound for what it was asked
    |-- CorpusError            text or a token store cannot be read or written
    |   |-- CorpusMissing      nothing is where the corpus should be
    |   |-- CorpusCorrupt      a store whose files do not agree with each other
    |   `-- InputError         raw input that cannot be used (no such column, not a known format, ...)
    |-- RunFolderError         a run folder cannot be used
    |   |-- RunFolderExists    it already holds a run
    |   |-- RunFolderInUse     another process is training in it
    |   |-- RunFolderMissing   it holds no run
    |   `-- CheckpointCorrupt  a checkpoint or model file that does not read back as it was written
    |-- RankError              one of several processes that train together is late, gone or in trouble; it is named
    `-- ModelError             a model that does not fit its parameters, its vocabulary or the engine

The command line prints the message and exits with status 2; a traceback is a bug.
"""


class UnheardError(Exception):
    """Anything that Unheard refuses or cannot do, with a message meant for a person."""


class ConfigError(UnheardError):
    pass


class UnknownKey(ConfigError):
    pass


class InvalidValue(ConfigError):
    pass


class PrivacyError(UnheardError):
    pass


class UnprovenCombination(PrivacyError):
    pass


class BudgetExceeded(PrivacyError):
    pass


class LedgerError(PrivacyError):
    pass


class AccountingError(PrivacyError):
    pass


class CorpusError(UnheardError):
    pass


class CorpusMissing(CorpusError):
    pass


class CorpusCorrupt(CorpusError):
    pass


class InputError(CorpusError):
    pass


class RunFolderError(UnheardError):
    pass


class RunFolderExists(RunFolderError):
    pass


class RunFolderInUse(RunFolderError):
    pass


class RunFolderMissing(RunFolderError):
    pass


class CheckpointCorrupt(RunFolderError):
    pass


class RankError(UnheardError):
    pass


class ModelError(UnheardError):
    pass
