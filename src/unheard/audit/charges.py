"""Was every round charged for what it was: the events of a ledger against those that its configuration gives.

In: a run and its ledger. Out: a sentence, or the first charge that does not fit, by its line.
"""

from unheard.audit.findings import Trouble
from unheard.privacy.events import FailureProbability, Gaussian, PoissonGaussian, Selection
from unheard.privacy.ledger import Ledger
from unheard.training.run import Run


def check_charges(run: Run, ledger: Ledger) -> str:
    """Each entry from the first round on is the event that the plan gives for its round, and no round is skipped."""
    entries, layout, event_of = ledger.entries, run.model.layout, {}
    past = _charged_before_the_first_round(ledger)
    if past > len(entries) or any(entry.round for entry in entries[:past]):
        raise Trouble(f"the ledger says that {past} charges came before the first round, and does not have them.")
    reached = selected = rounds_of_selection(run, ledger)
    for number, entry in enumerate(entries[past:], start=past + 2):  # line 1 is the header
        if entry.round > reached:
            raise Trouble(
                f"ledger.jsonl, line {number}: round {entry.round} was charged, but round {reached} never was."
            )
        reached = max(reached, entry.round + 1)
        if entry.round not in event_of:
            event_of[entry.round] = run.plan.at(entry.round, layout).event()
        if entry.event != event_of[entry.round]:
            raise Trouble(
                f"ledger.jsonl, line {number}: round {entry.round} was charged as {entry.event}, but the run file makes it "
                f"{event_of[entry.round]}."
            )
    again = len(entries) - past - (reached - selected)
    words = f"{reached} rounds, each charged with the q and z of the run file"
    words += f" ({selected} of them in one charge: the best of several runs)" if selected else ""
    words += f"; {again} were done, and charged, again after a stop" if again else ""
    return words + (f"; {past} charges from before the first round" if past else "")


def rounds_of_selection(run: Run, ledger: Ledger) -> int:
    """How many rounds were charged at once because the run is the best of several; 0 for any other run."""
    told = ledger.facts.get("selection")
    if not told:
        return 0
    place = _charged_before_the_first_round(ledger) - 1
    charged = ledger.entries[place].event if 0 <= place < len(ledger) else None
    event = run.plan.at(0, run.model.layout).event()
    q_and_z = (event.sampling_prob, event.noise_multiplier) if isinstance(event, PoissonGaussian) else None
    if not isinstance(charged, Selection) or q_and_z != (charged.sampling_prob, charged.noise_multiplier):
        raise Trouble(
            "the run was selected among several, but was not charged as that with the q and z of the run file."
        )
    return charged.rounds


def _charged_before_the_first_round(ledger: Ledger) -> int:
    """The vocabulary, and the run that this one began from. An older ledger does not say how many: then by their kind."""
    told = (ledger.facts.get("start") or {}).get("charges")
    if isinstance(told, int):
        return told
    kinds = (Gaussian, FailureProbability)
    return next((i for i, entry in enumerate(ledger.entries) if not isinstance(entry.event, kinds)), len(ledger))
