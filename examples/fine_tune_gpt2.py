"""Fine-tune a Hugging Face model with user-level privacy: all parameters, and LoRA matrices only.

Nothing is downloaded. The example creates a small GPT-2 and its tokenizer and trains them briefly on the documents of
this project, which are public. For your own model (a folder written by `save_pretrained`), prepare a corpus with its
tokenizer and name the folder in the run file:

    unheard prepare posts.jsonl --user-field who --text-field what --tokens MODEL/tokenizer.json --out corpora/posts

    [model]
    kind = "hugging_face"
    path = "MODEL"
    train = "lora"              # or "all"
    base_is_public = true       # you declare that no user of the corpus contributed to the weights

Run it (a few minutes on 2 cores): python examples/fine_tune_gpt2.py runs/gpt2      Needs: pip install 'unheard[hf,demo]'
"""

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

try:
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]
except ImportError:
    sys.exit(
        "This example needs Hugging Face's libraries. In a clone: pip install --constraint constraints.txt --editable '.[hf,demo]'"
    )

import unheard

END = "<|endoftext|>"
"""The token between two texts."""


def make_base(folder: Path, texts: list[str], *, pieces: int = 2000, width: int = 64, steps: int = 400) -> None:
    """Train a byte-pair tokenizer and a GPT-2 of two layers on public text, and save both like `save_pretrained`.

    Args:
        folder: The folder to write.
        texts: Public texts.
        pieces: Number of tokens of the tokenizer.
        width: Size of the embeddings.
        steps: Number of training steps.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=pieces, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )  # pyright: ignore[reportCallIssue]
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.token_to_id(END)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=tokenizer.get_vocab_size(), n_positions=64, n_embd=width, n_layer=2, n_head=2,
            bos_token_id=end, eos_token_id=end, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
        ids = torch.tensor([i for text in texts for i in [end, *tokenizer.encode(text).ids]])
        train_briefly(model, ids, steps)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def train_briefly(model: GPT2LMHeadModel, ids: torch.Tensor, steps: int) -> None:
    """Train a model without privacy on public text, which contains no data of users."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(ids) - 64, (16,)).tolist()
        window = torch.stack([ids[s : s + 64] for s in starts])
        loss = model(window, labels=window).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def run_on(corpus: Path, model: unheard.HuggingFaceModel, rounds: int, users_per_round: int) -> unheard.Run:
    """Return the run for one model. LoRA trains fewer parameters, so it has a larger learning rate and clip norm."""
    lora = model.train == "lora"
    return unheard.Run(
        corpus=corpus,
        model=model,
        plan=unheard.Plan(
            population=1000,
            sampling=unheard.PoissonSampling(users_per_round=users_per_round),
            update=unheard.FedAvg(batch_size=8, unroll=20, learning_rate=1.0 if lora else 0.3),
            clip=unheard.FlatClip(norm=1.0 if lora else 0.5),
            noise=unheard.GaussianNoise(noise_multiplier=0.6),
        ),
        training=unheard.Training(rounds=rounds),
        evaluation=unheard.Evaluation(every=rounds, max_tokens=20_000, unroll=20),
    )


def fine_tune(
    corpus: Path, base: Path, out: Path, rounds: int, users_per_round: int = 50
) -> list[tuple[str, float, float, float]]:
    """Train two runs: all parameters, and LoRA matrices only.

    Returns:
        For each run: `all` or `lora`, held-out accuracy before and after, and epsilon.
    """
    rows = []
    for what in ("all", "lora"):
        model = unheard.HuggingFaceModel(path=str(base), train=what, lora_rank=8, base_is_public=True)
        run = run_on(corpus, model, rounds, users_per_round)
        report, reports = None, unheard.train(run, out / what)
        before = unheard.evaluate(out / what)["accuracy_top1"]  # of the base model: no round has been run yet
        for report in reports:
            print(f"\r{what}: {model.layout.total:,} parameters, round {report.round} of {rounds}", end="", flush=True)
        assert report is not None
        assert report.metrics is not None
        after = report.metrics["accuracy_top1"]
        print(f"\n  held-out accuracy {before:.2%} before, {after:.2%} after", end="; ")
        print(f"epsilon {report.epsilon:.2f} at delta {report.delta:.1e}")
        rows.append((what, before, after, report.epsilon))
    return rows


def main(out: str, rounds: int = 60) -> None:
    """Make the base model and the corpus, fine-tune twice, and print a prediction of the LoRA model."""
    folder = Path(out)
    documents = Path(__file__).parents[1]
    public = [path.read_text() for path in sorted([documents / "README.md", *documents.glob("docs/**/*.md")])]
    make_base(folder / "base", public)
    # 320 tokens per user are two local steps of 8 windows of 20 tokens, which keeps the example fast.
    unheard.prepare("chitchat", folder / "corpus", tokenizer=folder / "base" / "tokenizer.json", tokens_per_user=320)
    fine_tune(folder / "corpus", folder / "base", folder, rounds)
    print("then:", unheard.Released.open(folder / "lora").predict("how are"))


if __name__ == "__main__":
    asked = argparse.ArgumentParser(
        description="Fine-tune a small GPT-2 with user-level privacy, whole and through LoRA."
    )
    asked.add_argument("out", help="folder to create, for the base model, the corpus and two runs")
    asked.add_argument("--rounds", type=int, default=60)
    given = asked.parse_args()
    main(given.out, given.rounds)
