"""Whether a run fits its corpus and its model: what would fail later, or has no proof, is refused before anything is charged.

In: a Run and its store. Out: nothing, or an error that says the cure.
"""

import torch

from unheard.corpus.store import TokenStore
from unheard.errors import CorpusError, ModelError, UnprovenCombination
from unheard.mechanism.noise import NoNoise
from unheard.models.hugging_face import HuggingFaceModel
from unheard.models.model import LanguageModel
from unheard.training.run import Run


def check_fits(run: Run, store: TokenStore) -> None:
    """Refuse now what would fail later."""
    if isinstance(run.model, HuggingFaceModel):
        check_base(run, run.model, store)
    if run.model.vocabulary_size != len(store.vocabulary):
        raise ModelError(
            f"The model has {run.model.vocabulary_size} rows, the corpus's vocabulary {len(store.vocabulary)} words. "
            f"Set model.vocabulary_size = {len(store.vocabulary)}."
        )
    if not store.train.num_users or not store.held_out.num_users:
        raise CorpusError(
            f"{store.path} needs users to train on and others held out. Prepare it with a larger --held-out, or more users."
        )
    for split in (store.train, store.held_out):
        split.check_boundaries()
    if run.model.user_features:
        for split in (store.train, store.held_out):
            if split.num_features != run.model.user_features:
                raise ModelError(
                    f"The model takes {run.model.user_features} features of each user, the corpus has {split.num_features}. "
                    f"Set model.user_features = {split.num_features}."
                )
    check_forgets(run.model)
    for _, plan in run.plan.phases(run.model.layout):
        plan.event()


def check_base(run: Run, model: HuggingFaceModel, store: TokenStore) -> None:
    """A model from elsewhere: may these people be trained into it, does it know their words, can it look so far?"""
    if not isinstance(run.plan.noise, NoNoise) and not model.base_is_public:
        # DP: weights of unknown origin may have seen these users without noise.
        raise UnprovenCombination(
            f"{model.path} is a model without a ledger: nobody can say what it cost these users. If none of them had a part in it, "
            "set model.base_is_public = true."
        )
    model.check_words(store.info.get("tokens", {}), store.vocabulary)
    if model.context is not None and max(run.plan.update.unroll, run.evaluation.unroll) > model.context:
        raise ModelError(
            f"{model.path} looks at {model.context} tokens at most. Lower update.unroll = {run.plan.update.unroll} or "
            f"evaluation.unroll = {run.evaluation.unroll}."
        )


def check_forgets(model: LanguageModel) -> None:
    """A model that draws (dropout that is always on) or remembers (a state kept from call to call) is refused."""
    params = model.layout.split(model.initial(0))
    features_F = torch.zeros(model.user_features) if model.user_features else None
    one_14, other_14 = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[3, 3, 2, 1]])
    before = model.logits(params, one_14, features_F).clone()
    model.logits(params, other_14, features_F)
    # DP: what one user adds must be a function of the parameters and their own text, not of who came before them.
    if not torch.equal(before, model.logits(params, one_14, features_F)):
        raise ModelError(
            "The model gives different scores for the same words: it draws random numbers, or keeps something from call to call, "
            "which would carry one user's text into another's update. Make it a function of parameters and tokens alone."
        )
