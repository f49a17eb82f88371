"""Train your own torch.nn.Module with privacy, without a change to the package: here a small causal Transformer.

A module must map tokens [B, T] to logits [B, T, V], and torch.func must be able to differentiate it for many users at
once: no dropout, no running statistics, no in-place writes to buffers. A run file names the module like this (call
`unheard train` in the folder of the module):

    [model]
    kind = "module"
    module = "small_transformer:SmallTransformer"
    vocabulary_size = 10000
    arguments = {vocabulary_size = 10000, width = 64, depth = 2, heads = 4, context = 80}

Run it: python examples/small_transformer.py corpora/chitchat runs/transformer
"""

import sys

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """One layer of the Transformer: causal attention, then a small network at each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = self.to_qkv(self.norm1(x_BTD)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        scores_BNTT = q @ k.mT / (D // self.heads) ** 0.5
        future_TT = torch.ones(T, T, dtype=torch.bool, device=x_BTD.device).triu(1)
        mixed = torch.softmax(scores_BNTT.masked_fill(future_TT, float("-inf")), dim=-1) @ v
        x_BTD = x_BTD + self.from_heads(mixed.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.shrink(nn.functional.gelu(self.grow(self.norm2(x_BTD))))


class SmallTransformer(nn.Module):
    """A causal Transformer that returns the logits of the next word. The output layer is the word embedding (tied).

    Args:
        vocabulary_size: Number of words.
        width: Size of the embeddings.
        depth: Number of layers.
        heads: Number of attention heads.
        context: Largest number of tokens in a window.
    """

    def __init__(
        self, vocabulary_size: int, width: int = 64, depth: int = 2, heads: int = 4, context: int = 80
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary_size, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.words(tokens_BT) * 0.1 + self.places(places_T) * 0.1
        return self.norm(self.blocks(x_BTD)) @ self.words.weight.T


def main(corpus: str, out: str, rounds: int = 60) -> None:
    """Train the model on a token store and print each evaluation.

    Args:
        corpus: Folder of the store.
        out: Folder of the run.
        rounds: Number of rounds.
    """
    import unheard

    size = len(unheard.TokenStore.open(corpus).vocabulary)
    run = unheard.Run(
        corpus=corpus,
        model=unheard.ModuleModel(
            module="small_transformer:SmallTransformer", arguments={"vocabulary_size": size}, vocabulary_size=size
        ),
        plan=unheard.Plan(
            population=1000,
            sampling=unheard.PoissonSampling(users_per_round=50),
            update=unheard.FedAvg(learning_rate=0.3, unroll=20),
            clip=unheard.FlatClip(norm=1.0),
            noise=unheard.GaussianNoise(noise_multiplier=0.5),
        ),
        training=unheard.Training(rounds=rounds),
        evaluation=unheard.Evaluation(every=10, max_tokens=10_000),
    )
    for report in unheard.train(run, out):
        if report.metrics:
            print(
                f"round {report.round}: top-1 {100 * report.metrics['accuracy_top1']:.2f} %, epsilon {report.epsilon:.2f}"
            )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
