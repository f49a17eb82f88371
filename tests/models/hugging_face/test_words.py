"""The mapping from token ids of a store to rows of the model, and the score of a token without a row."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as nnf
from tokenizers import Tokenizer, models
from torch import nn

from unheard.corpus.tokenizers import HuggingFaceTokenizer
from unheard.corpus.vocabulary import BOS, EOS, UNK, tokenizer_vocabulary
from unheard.errors import ModelError
from unheard.models.hugging_face import UNSAID, StoreVocabularyModel, rows_of


class Scores(nn.Module):
    """A model whose scores after token i are row i of a table."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(float(rows * rows)).view(rows, rows).sin())

    def forward(self, ids, use_cache):
        return SimpleNamespace(logits=self.table[ids])


def pieces(words: dict[str, int], unk: str | None = None) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(definition=Tokenizer(models.WordLevel(words, unk_token=unk or "")).to_str())


def config(**changes):
    return SimpleNamespace(**{"vocab_size": 6, "bos_token_id": 5, "eos_token_id": 5, **changes})


TOKENIZER = pieces({"a": 0, "b": 1, "c": 2})


def test_words_have_their_rows_and_the_special_ones_those_of_the_config():
    words = tokenizer_vocabulary(TOKENIZER)
    assert words.words[3:] == ("a", "b", "c")
    assert rows_of(words, TOKENIZER, config(bos_token_id=4)) == [4, 5, 5, 0, 1, 2]
    assert rows_of(words, TOKENIZER, config(bos_token_id=None, eos_token_id=[3, 4])) == [3, 3, 3, 0, 1, 2]


def test_a_tokenizer_with_more_pieces_than_rows_or_a_model_without_an_end_is_refused():
    words = tokenizer_vocabulary(TOKENIZER)
    with pytest.raises(ModelError, match="do not belong together"):
        rows_of(words, TOKENIZER, config(vocab_size=2, bos_token_id=1, eos_token_id=1))
    with pytest.raises(ModelError, match="eos_token_id"):
        rows_of(words, TOKENIZER, config(eos_token_id=None))


@pytest.mark.parametrize("rows", [[4, 5, 3, 0, 1, 2], [4, 5, 3, 2, 0, 1]])
def test_where_every_word_has_a_row_the_scores_are_the_models_own(rows):
    base = Scores(6)
    logits = StoreVocabularyModel(base, rows)(torch.tensor([[3, EOS]]))
    assert torch.equal(logits, base.table[[rows[3], 5]][None][..., rows])


def test_a_word_without_a_row_has_a_fixed_share_and_teaches_nothing():
    module = StoreVocabularyModel(Scores(6), [5, 5, 5, 0, 1, 2])
    logits = module(torch.tensor([[3]]))[0, 0]
    share = logits.softmax(-1)
    assert share[BOS].item() == share[UNK].item() == pytest.approx(torch.tensor(-UNSAID).exp().item(), rel=1e-4)
    plain = module.base.table[0][[5, 0, 1, 2]].log_softmax(-1)
    assert torch.allclose(logits.log_softmax(-1)[[EOS, 3, 4, 5]], plain, atol=1e-6)
    nnf.cross_entropy(logits[None], torch.tensor([UNK])).backward()
    assert module.base.table.grad.abs().max() < 1e-6


def test_a_piece_that_is_the_end_of_the_text_gives_its_row_to_eos():
    module = StoreVocabularyModel(Scores(4), [0, 0, 0, 0, 1, 2])
    assert module.is_said_V.tolist() == [False, True, False, False, True, True]
