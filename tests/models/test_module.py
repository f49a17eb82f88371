"""Any torch module, by name or in hand; and what is refused."""

import pytest
import torch
from torch import nn

import unheard
from unheard.errors import InvalidValue, ModelError


class Scores(nn.Module):
    def __init__(self, rows: int = 5) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, rows)

    def forward(self, tokens):
        return self.words(tokens)


def by_name(**changes) -> unheard.ModuleModel:
    return unheard.ModuleModel(**{"module": f"{__name__}:Scores", "vocabulary_size": 5, **changes})


def test_a_module_by_name_gives_its_own_logits():
    model = by_name()
    params_P = torch.arange(25.0)
    assert model.logits(model.layout.split(params_P), torch.tensor([[2]])).tolist() == [[[10, 11, 12, 13, 14]]]


def test_its_initialisation_follows_the_seed():
    model = by_name()
    assert torch.equal(model.initial(1), model.initial(1))
    assert not torch.equal(model.initial(1), model.initial(2))


def test_arguments_reach_the_class():
    assert by_name(arguments={"rows": 7}, vocabulary_size=7).layout.total == 49


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("no.such.place:Scores", "No module class"),
        (f"{__name__}:Missing", "No module class"),
        ("os:system", "not a torch.nn.Module"),
    ],
)
def test_what_is_not_a_module_class_is_never_called(module, message):
    with pytest.raises(ModelError, match=message):
        _ = by_name(module=module).layout


def test_wrong_arguments_and_wrong_shapes_are_named():
    with pytest.raises(ModelError, match=r"model\.arguments"):
        _ = by_name(arguments={"columns": 1}).layout
    model = by_name(vocabulary_size=6)
    with pytest.raises(ModelError, match=r"was expected"):
        model.logits(model.layout.split(torch.zeros(25)), torch.tensor([[2]]))
    with pytest.raises(InvalidValue, match=r"package\.file:Class"):
        by_name(module="Scores")


def test_a_module_in_hand_begins_with_the_weights_that_it_has():
    mine = Scores()
    model = unheard.ModuleModel.wrap(mine, vocabulary_size=5)
    assert torch.equal(model.initial(0), mine.words.weight.detach().flatten())
    assert torch.equal(model.initial(1), model.initial(0))


class WithDropout(Scores):
    def forward(self, tokens):
        return nn.functional.dropout(self.words(tokens), 0.5, training=self.training)


def test_a_private_round_is_a_function_of_parameters_and_tokens_alone_so_dropout_is_off():
    model = unheard.ModuleModel.wrap(WithDropout(), vocabulary_size=5)
    params, tokens = model.layout.split(model.initial(0)), torch.arange(5).view(1, 5)
    assert torch.equal(model.logits(params, tokens), model.logits(params, tokens))


def test_a_module_in_the_working_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_own_file.py").write_text("from torch import nn\n\n\nclass Mine(nn.Embedding):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    model = unheard.ModuleModel(
        module="my_own_file:Mine", arguments={"num_embeddings": 5, "embedding_dim": 5}, vocabulary_size=5
    )
    assert model.layout.total == 25
