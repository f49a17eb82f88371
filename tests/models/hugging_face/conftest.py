"""A small GPT-2 from the example, and a store of forty users in tokens of this model."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra hf: pip install 'unheard[hf]'")
pytest.importorskip("peft", reason="needs the extra hf: pip install 'unheard[hf]'")

import unheard
from unheard.corpus.encode import EncodingOptions
from unheard.corpus.grouping import SplitRule
from unheard.corpus.pipeline import Preparation, build_store
from unheard.corpus.sources import Fields, find_sources
from unheard.corpus.tokenizers import HuggingFaceTokenizer
from unheard.corpus.vocabulary import TokenizerVocabulary

THINGS = ["tea with milk", "the long road", "a red boat", "my old piano", "rain on the roof"]
POSTS = ["i like {}", "do you know {} ?", "{} and {} again", "we saw {} today, {} !"]


def posts(rng: np.random.Generator, count: int) -> list[str]:
    return [str(rng.choice(POSTS)).format(*rng.choice(THINGS, size=2)) for _ in range(count)]


def load_example():
    path = Path(__file__).parents[3] / "examples" / "fine_tune_gpt2.py"
    spec = importlib.util.spec_from_file_location("fine_tune_gpt2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def example():
    return load_example()


@pytest.fixture(scope="session")
def base(tmp_path_factory, example) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    example.make_base(folder, posts(np.random.default_rng(1), 200), pieces=300, width=16, steps=20)
    return folder


@pytest.fixture(scope="session")
def people(tmp_path_factory) -> Path:
    """Write the posts of forty users as JSON lines."""
    rng, path = np.random.default_rng(2), tmp_path_factory.mktemp("raw") / "posts.jsonl"
    rows = [{"who": f"u{k}", "what": post} for k in range(40) for post in posts(rng, int(rng.integers(3, 9)))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, base, people) -> Path:
    """Prepare the store with the tokenizer.json of the model, as a user does."""
    preparation = Preparation(
        fields=Fields(user="who", text="what"),
        tokenizer=HuggingFaceTokenizer.read(base / "tokenizer.json"),
        vocabulary=TokenizerVocabulary(),
        encoding=EncodingOptions(tokens_per_user=60, min_tokens=10),
        splits=SplitRule(held_out=0.2),
    )
    out = tmp_path_factory.mktemp("corpora") / "posts"
    build_store(find_sources([str(people)]), out, preparation)
    return out


def model_of(base: Path, train: str = "all", **changes) -> unheard.HuggingFaceModel:
    settings = {"path": str(base), "train": train, "lora_rank": 2, "base_is_public": True, **changes}
    return unheard.HuggingFaceModel(**settings)


def run_of(corpus: Path, model: unheard.HuggingFaceModel, **changes) -> unheard.Run:
    settings = {
        "corpus": corpus,
        "model": model,
        "plan": unheard.Plan(
            population=60,
            sampling=unheard.PoissonSampling(users_per_round=8),
            update=unheard.FedAvg(batch_size=2, unroll=7, learning_rate=0.2),
            clip=unheard.FlatClip(norm=0.4),
            noise=unheard.GaussianNoise(noise_multiplier=0.5),
        ),
        "training": unheard.Training(rounds=2),
        "evaluation": unheard.Evaluation(every=2, max_tokens=300, unroll=16),
        **changes,
    }
    return unheard.Run(**settings)


@pytest.fixture(scope="session")
def llama(tmp_path_factory, base):
    """A Llama with the tokenizer of the GPT-2."""
    return other_base(tmp_path_factory.mktemp("models") / "llama", base)


def other_base(folder, base, kind="llama", **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    own = json.loads((base / "config.json").read_text())
    settings = {
        "vocab_size": own["vocab_size"],
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": own["bos_token_id"],
        "eos_token_id": own["eos_token_id"],
        **changes,
    }
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).save_pretrained(folder)
    shutil.copy(base / "tokenizer.json", folder)
    return folder
