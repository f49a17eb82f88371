"""The GRU agrees with torch's GRU."""

import pytest
import torch
from torch import nn

import unheard


def torchs_gru(model: unheard.TiedGRU, params: dict[str, torch.Tensor]) -> nn.GRU:
    """torch orders gates reset, update, new, as ours; it keeps input and state weights apart and transposed."""
    gru = nn.GRU(model.embedding_size, model.hidden_size, batch_first=True)
    weight = torch.cat([params[f"{gate}_weight"] for gate in model.gates], dim=1).T
    with torch.no_grad():
        gru.weight_ih_l0.copy_(weight[:, : model.embedding_size])
        gru.weight_hh_l0.copy_(weight[:, model.embedding_size :])
        gru.bias_ih_l0.copy_(torch.cat([params[f"{gate}_bias"] for gate in model.gates]))
        gru.bias_hh_l0.zero_()
    return gru


@pytest.mark.parametrize("tied", [True, False])
def test_the_logits_are_those_of_torchs_gru(tied):
    model = unheard.TiedGRU(vocabulary_size=20, embedding_size=5, hidden_size=7, tied=tied)
    params = model.layout.split(model.initial(3) * 1.7)
    tokens = torch.randint(20, (3, 6), generator=torch.Generator().manual_seed(0))
    rows = {name: nn.functional.normalize(params[name], dim=1) for name in params if "embedding" in name}
    hidden, _ = torchs_gru(model, params)(rows["embedding"][tokens])
    output = hidden @ params["projection_weight"] + params["projection_bias"]
    expected = output @ rows["embedding" if tied else "output_embedding"].T
    torch.testing.assert_close(model.logits(params, tokens, None), expected.detach(), atol=1e-5, rtol=1e-5)


def test_the_gru_has_nine_layers_and_three_quarters_of_the_lstms_gates():
    gru, lstm = unheard.TiedGRU(vocabulary_size=10_000).layout, unheard.TiedLSTM(vocabulary_size=10_000).layout
    assert len(gru) == 9
    assert lstm.total - gru.total == (96 + 256 + 1) * 256


def test_a_run_file_may_name_it():
    from unheard.training.run import MODELS

    assert MODELS["tied_gru"] is unheard.TiedGRU
