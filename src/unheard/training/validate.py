"""Checks that a run fits its corpus and its model, before anything is charged.

Input: a `Run` and its store. Output: nothing, or an error that names the rule and the remedy. Combinations of parts
without a privacy proof are refused earlier, when the `Plan` is built (mechanism/plan.py).
"""

import logging

import torch

from unheard.corpus.store import TokenStore, UserTokens
from unheard.errors import CorpusError, ModelError, PrivacyError
from unheard.mechanism.noise import NoNoise
from unheard.models.model import LanguageModel
from unheard.training.run import Run


def check_permission(run: Run, allow_no_privacy: bool) -> None:
    """Check that a run adds noise, or that the caller has allowed a run that does not.

    Raises:
        PrivacyError: The run adds no noise and `allow_no_privacy` is False.
    """
    # DP: the first round without noise makes the epsilon of these users infinite over all runs, and nothing undoes it.
    if isinstance(run.plan.noise, NoNoise) and not allow_no_privacy:
        raise PrivacyError(
            "This run adds no noise. Its first round makes epsilon infinite, for good and over all runs, for the users of "
            f"{run.corpus}. Add noise ([noise] kind = 'gaussian'); or, if the text is public or its users agreed, allow it: "
            "allow_no_privacy=True in Python, --yes on the command line."
        )


def check_run(run: Run, store: TokenStore, users: UserTokens | None = None) -> None:
    """Check everything that would otherwise fail during training.

    Args:
        run: The run as configured.
        store: Its store.
        users: The users to train on; None for those of the store. The nodes of a federated run check their own users.

    Raises:
        ModelError: The model does not fit the vocabulary or the user features, or keeps a state between calls.
        CorpusError: The store has no training users or no held-out users, or its boundaries are damaged.
        UnprovenCombination: A round of the schedule has no privacy event, or the model's weights are of unknown origin.
    """
    run.model.check_store(
        store.info.get("tokens", {}),
        store.vocabulary,
        unrolls={"update.unroll": run.plan.update.unroll, "evaluation.unroll": run.evaluation.unroll},
        is_private=not isinstance(run.plan.noise, NoNoise),
    )
    users = store.train if users is None else users
    if not users.num_users or not store.held_out.num_users:
        raise CorpusError(
            f"{store.path} needs users to train on and others held out. Prepare it with a larger --held-out, or more "
            "users."
        )
    if users.num_users > run.plan.population:
        # One bit about the store, for its owner, who sees this message; the number itself is never printed.
        logging.getLogger("unheard").warning(
            "The declared population (privacy.population = %d) is smaller than the number of users in %s. The guarantee "
            "holds, since the declared q is the one that users are drawn with; but more users than users_per_round take "
            "part in a round, and each round costs more than it needs to. Declare a public number that is at least as "
            "large as the number of users.",
            run.plan.population,
            store.path,
        )
    for split in (store.train, store.held_out) if users is store.train else (store.held_out,):
        split.check_boundaries()
        if run.model.user_features and split.num_features != run.model.user_features:
            raise ModelError(
                f"The model takes {run.model.user_features} features of each user, the corpus has "
                f"{split.num_features}. Set model.user_features = {split.num_features}."
            )
    check_is_pure(run.model)
    for _, plan in run.plan.phases(run.model.layout):
        plan.event()


def check_is_pure(model: LanguageModel) -> None:
    """Raise `ModelError` if the model draws random numbers (active dropout) or keeps a state between calls."""
    params = model.layout.split(model.initial(0))
    features_F = torch.zeros(model.user_features) if model.user_features else None
    first_14, second_14 = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[3, 3, 2, 1]])
    before = model.logits(params, first_14, features_F).clone()
    model.logits(params, second_14, features_F)
    # DP: what one user adds must be a function of the parameters and their own text, not of who came before them.
    if not torch.equal(before, model.logits(params, first_14, features_F)):
        raise ModelError(
            "The model gives different scores for the same words: it draws random numbers, or keeps something from "
            "call to call, which would carry one user's text into another's update. Make it a function of parameters "
            "and tokens alone."
        )
