"""Between a store's numbers and a model's rows: tokens of the store in, scores over the store's words out.

A store counts BOS, EOS and UNK first and then the tokenizer's pieces in their order; a model has its pieces at its own numbers, and
its special tokens where its config says, sometimes one for all three. Where a row would count twice, the first of EOS, BOS, UNK
and the words has it, and the others keep a fixed small share: as targets they teach nothing, and they are never guessed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from unheard.corpus.tokens import TokenizerFile
from unheard.corpus.vocabulary import BOS, EOS, SPECIALS, UNK, Vocabulary
from unheard.errors import ModelError

UNSAID = 20.0
"""A word without a row of its own has e^-20 of the probability, whatever the model says."""


class InWordsOfTheStore(nn.Module):
    """A causal language model around which the store's vocabulary stands in place of its own."""

    def __init__(self, base: nn.Module, rows: list[int]) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("row_V", torch.tensor(rows))
        first = _first_owners(rows)
        self.register_buffer("is_said_V", torch.tensor([first[row] == word for word, row in enumerate(rows)]))
        self.all_are_said = len(first) == len(rows)
        # The pieces stand in order from row 0 on, as they do in most models: a slice's gradient is a copy, a gather's a scatter.
        self.num_words = len(rows) - len(SPECIALS)
        self.in_order = rows[len(SPECIALS) :] == list(range(self.num_words))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        row_V, is_said_V = self.get_buffer("row_V"), self.get_buffer("is_said_V")
        scores_BTR = self.base(row_V[tokens_BT], use_cache=False).logits
        special_BT3 = scores_BTR[..., row_V[: len(SPECIALS)]]
        word_BTW = scores_BTR[..., : self.num_words] if self.in_order else scores_BTR[..., row_V[len(SPECIALS) :]]
        logits_BTV = torch.cat([special_BT3, word_BTW], dim=-1)
        if self.all_are_said:
            return logits_BTV
        total_BT1 = logits_BTV.masked_fill(~is_said_V, float("-inf")).logsumexp(dim=-1, keepdim=True)
        return torch.where(is_said_V, logits_BTV, total_BT1 - UNSAID)


def rows_of(words: Vocabulary, tokenizer: TokenizerFile, config: Any) -> list[int]:
    """For each word of the store, the model's number for it."""
    own: Any = tokenizer.tokenizer
    eos = _first(getattr(config, "eos_token_id", None))
    if eos is None:
        raise ModelError("The model's config.json names no eos_token_id: a model must know how a text ends. Add it.")
    bos = _first(getattr(config, "bos_token_id", None))
    unk = getattr(own.model, "unk_token", None)
    unk = own.token_to_id(unk) if unk else None
    special = {BOS: eos if bos is None else bos, EOS: eos, UNK: eos if unk is None else unk}
    rows = [special[word] for word in range(len(SPECIALS))] + [own.token_to_id(w) for w in words.words[len(SPECIALS) :]]
    if not 0 <= min(rows) <= max(rows) < config.vocab_size:
        raise ModelError(
            f"The tokenizer has pieces up to number {max(rows)}, the model {config.vocab_size} rows: they do not belong together. "
            "Take tokenizer.json and weights from one model."
        )
    return rows


def _first_owners(rows: list[int]) -> dict[int, int]:
    """Which word has each row. BOS is never a target, so it gives way to EOS; UNK is not a word, so it gives way to both."""
    owner: dict[int, int] = {}
    for word in (EOS, BOS, UNK, *range(len(SPECIALS), len(rows))):
        owner.setdefault(rows[word], word)
    return owner


def _first(number: int | list[int] | None) -> int | None:
    """Some configs name several ends of a text."""
    return number[0] if isinstance(number, list) else number
