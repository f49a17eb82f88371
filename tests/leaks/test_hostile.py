"""Malicious run folders and stores: every command refuses them with one message, and executes none of their code."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save as save_tensors

import unheard
from unheard.corpus.store import write_digests
from unheard.privacy import ledger as chain
from unheard.privacy.ledger import Ledger
from unheard.training import checkpoint

VERBS = ("resume", "evaluate", "predict", "statement", "verify")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, store, model, plan):
    folder = tmp_path_factory.mktemp("hostile")
    shutil.copytree(store.path, folder / "corpus")
    run = unheard.Run(
        corpus=folder / "corpus",
        model=model,
        plan=replace(plan, sampling=unheard.PoissonSampling(users_per_round=60)),  # q = 1 is quick to account for
        training=unheard.Training(rounds=2, checkpoint_every=1),
        evaluation=unheard.Evaluation(every=1, max_tokens=100, unroll=20),
    )
    list(unheard.train(run, folder / "r"))
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    toml = tmp_path / "r" / "run.toml"
    toml.write_text(toml.read_text().replace(str(trained), str(tmp_path)))
    return tmp_path


def tried(command, folder: Path, verbs=VERBS) -> dict[str, tuple[int, str]]:
    """Return the exit status and the output of each command. An exception other than SystemExit fails the test."""
    words = {
        "resume": ("resume", folder / "r", "--rounds", 4),
        "evaluate": ("evaluate", folder / "r"),
        "predict": ("predict", folder / "r", "w3"),
        "statement": ("statement", folder / "r"),
        "verify": ("verify", folder / "r"),
    }
    done = {verb: command(*words[verb]) for verb in verbs}
    assert all(one.status in (0, 2) for one in done.values())
    assert not any("Traceback" in one.said for one in done.values())
    return {verb: (one.status, one.said) for verb, one in done.items()}


RUN_FILES = {
    "a vocabulary of 10^14": ("vocabulary_size = 50", "vocabulary_size = 100000000000000"),
    "a model of 10^18 parameters": ("hidden_size = 8", "hidden_size = 1000000000"),
    "a negative size": ("hidden_size = 8", "hidden_size = -8"),
    "a population of 10^30": ("population = 60", "population = 1000000000000000000000000000000"),
    "a norm that is no number": ("norm = 2.0", "norm = nan"),
    "an infinite norm": ("norm = 2.0", "norm = inf"),
    "noise that is no number": ("noise_multiplier = 0.5", "noise_multiplier = nan"),
    "a delta of 1": ("delta = ", "delta = 1.0 # "),
    "a command for a model": ('kind = "tied_lstm"', 'kind = "module"\nmodule = "os:system"'),
    "rounds without end": ("rounds = 2", "rounds = 999999999999999999999"),
    "a chunk of nothing": ('kind = "auto"', 'kind = "auto"\nusers_at_once = 0'),
    "not TOML": ("[corpus]", "[corpus"),
    "text for a number": ("unroll = 5", 'unroll = "5"'),
    "a corpus far up": ('path = "', 'path = "../../../../../../../etc/'),
    "a zero byte": ("[corpus]", "\0[corpus]"),
}


@pytest.mark.parametrize("case", RUN_FILES)
def test_a_hostile_run_file_is_refused(folder, unheard_command, case):
    file = folder / "r" / "run.toml"
    before, after = RUN_FILES[case]
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after, 1))
    done = tried(unheard_command, folder, ("resume", "predict", "verify"))
    assert done["resume"][0] == 2
    # The path of the corpus is not part of the run's hash.
    assert done["verify"][0] == (0 if case == "a corpus far up" else 2)


def sealed(facts: dict, tensors: dict[str, torch.Tensor]) -> bytes:
    text = json.dumps(facts, sort_keys=True)
    try:
        digest = checkpoint._digest(tensors, text)
    except TypeError:  # numpy has no bfloat16, so there is no valid digest
        digest = "0" * 64
    return save_tensors(tensors, {"unheard": text, "sha256": digest})


@pytest.mark.parametrize(
    ("tensor", "round"),
    [
        (lambda n: torch.full((n,), torch.nan), 2),
        (lambda n: torch.full((n,), torch.inf), 2),
        (lambda n: torch.zeros(n, dtype=torch.int64), 2),
        (lambda n: torch.zeros(n, dtype=torch.bfloat16), 2),
        (lambda n: torch.zeros(n, dtype=torch.complex64), 2),
        (lambda n: torch.zeros(n, dtype=torch.bool), 2),
        (lambda n: torch.zeros(n + 1), 2),
        (lambda n: torch.zeros(1, n), 2),
        (lambda n: torch.zeros(0), 2),
        (lambda n: torch.zeros(()), 2),
        (lambda n: torch.zeros(n), 10**18),
        (lambda n: torch.zeros(n), -1),
        (lambda n: torch.zeros(n), "two"),
        (lambda n: torch.zeros(n), None),
    ],
    ids=range(14),
)
def test_a_hostile_checkpoint_is_refused(folder, unheard_command, model, tensor, round):
    """The digest is valid, so only the checks of the content can refuse the file."""
    ledger = Ledger.read(folder / "r" / "ledger.jsonl")
    facts = {"round": round, "ledger_length": len(ledger), "ledger_head": ledger.head}
    file = folder / "r" / "checkpoints" / "round-00000002.safetensors"
    file.write_bytes(sealed(facts, {"params": tensor(model.layout.total)}))
    done = tried(unheard_command, folder, ("resume", "verify"))
    assert done["resume"][0] == 2
    assert done["verify"][0] == 2


@pytest.mark.parametrize("spoil", ["nan", "int", "half", "shape", "names", "empty", "cut", "pickle", "huge header"])
def test_a_hostile_model_file_is_refused(folder, unheard_command, model, spoil):
    file = folder / "r" / "model.safetensors"
    layers = {name: t.clone() for name, t in model.layout.split(model.initial(0)).items()}
    if spoil == "nan":
        layers["embedding"][0, 0] = torch.nan
    elif spoil in ("int", "half"):
        layers = {k: t.to(torch.int32 if spoil == "int" else torch.bfloat16) for k, t in layers.items()}
    elif spoil == "shape":
        layers["embedding"] = layers["embedding"].T.contiguous()
    elif spoil == "names":
        layers["../../escaped"] = layers.pop("embedding")
    content = {
        "empty": b"",
        "cut": file.read_bytes()[:100],
        "pickle": pickle.dumps(Bomb()),
        "huge header": (2**62).to_bytes(8, "little") + b"{}",
    }.get(spoil) or (b"" if spoil == "empty" else sealed({"round": 2}, layers))
    file.write_bytes(content)
    done = tried(unheard_command, folder, ("evaluate", "predict", "verify"))
    assert [status for status, _ in done.values()] == [2, 2, 2]
    assert not (folder.parent / "escaped").exists()


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


FACTS = [
    {"delta": "small"}, {"delta": 5.0}, {"delta": None, "population": None}, {"delta": -1.0}, {"population": "many"},
    {"start": 3}, {"start": {"charges": 10**12}}, {"randomness": 5}, {"phases": "none"}, {"run_id": {"a": 1}}, {"run_hash": 7},
    {"vocabulary": "words"}, {"sampling": []},
]  # fmt: skip


@pytest.mark.parametrize("change", FACTS, ids=range(len(FACTS)))
def test_a_ledger_with_strange_facts_is_refused_or_printed_safely(folder, unheard_command, change):
    file = folder / "r" / "ledger.jsonl"
    head, out = "", b""
    for number, line in enumerate(file.read_bytes().splitlines()):
        record = json.loads(line)
        del record["hash"]
        if number == 0:
            record["facts"] = {k: v for k, v in {**record["facts"], **change}.items() if v is not None}
        sealed_line, head = chain.seal(record, head)
        out += sealed_line
    file.write_bytes(out)
    done = tried(unheard_command, folder, ("resume", "statement", "verify"))
    assert done["verify"][0] == 2
    assert done["resume"][0] == 2


OTHER_FILES = {
    "vocabulary.txt": [b"", b"\xff\xfe\x00", b"<BOS>\n<EOS>\n<UNK>\n", b"x\n" * 50],
    "tokens.json": [b"[]", b'{"kind": "evil"}', b"{", b"[" * 100_000, b'{"kind": "words", "words": 7}'],
    "statement.json": [b"[]", b"3", b"{", b"[" * 100_000],
    "metrics.jsonl": [b'{"round": "x"}\n', b'{"round": 1e999}\n', b"[[[\n", b'{"round": {}}\n', b"\xff\n"],
}


@pytest.mark.parametrize(("name", "content"), [(n, c) for n, cs in OTHER_FILES.items() for c in cs], ids=range(18))
def test_a_strange_small_file_is_refused_or_passed_over(folder, unheard_command, name, content):
    (folder / "r" / name).write_bytes(content)
    verbs = {"tokens.json": ("predict",), "metrics.jsonl": ("resume", "verify")}.get(name, ("predict", "verify"))
    done = tried(unheard_command, folder, verbs)
    if name in ("vocabulary.txt", "statement.json"):
        assert done["verify"][0] == 2


def spoiled_offsets(change):
    def spoil(corpus: Path) -> None:
        file = corpus / "train" / "00000.offsets"
        offsets = np.fromfile(file, dtype="<i8")
        change(offsets)
        offsets.tofile(file)

    return spoil


def _swap(offsets):
    offsets[[3, 4]] = offsets[[4, 3]]


def _negative(offsets):
    offsets[2] = -5


def _far(offsets):
    offsets[5] = 2**62


def _late(offsets):
    offsets[0] = 1


def write_features(corpus: Path) -> None:
    np.save(corpus / "train" / "features.npy", np.array([Bomb()], dtype=object), allow_pickle=True)


def large_tokens(corpus: Path) -> None:
    file = corpus / "train" / "00000.tokens"
    tokens = np.fromfile(file, dtype="<u2")
    tokens[1:] = 60_000
    tokens.tofile(file)


def changed_json(name: str, **changes):
    def spoil(corpus: Path) -> None:
        content = json.loads((corpus / name).read_text())
        (corpus / name).write_text(json.dumps({**content, **changes}))

    return spoil


STORES = {
    "users that go backwards": spoiled_offsets(_swap),
    "a user before the beginning": spoiled_offsets(_negative),
    "a user beyond the end": spoiled_offsets(_far),
    "tokens of nobody": spoiled_offsets(_late),
    "words that do not exist": large_tokens,
    "features that are code": write_features,
    "a million million shards": changed_json("layout.json", shards=10**12),
    "no shards": changed_json("layout.json", shards=-1),
    "objects for numbers": changed_json("layout.json", dtype="|O"),
    "wide numbers": changed_json("layout.json", dtype="<u8"),
    "another format": changed_json("corpus.json", format=99),
    "events that cost nothing": changed_json("corpus.json", vocabulary={"events": [{"kind": "free"}]}),
    "events that are no list": changed_json("corpus.json", vocabulary={"events": 7, "sha256": "x"}),
    "tokens that are no table": changed_json("corpus.json", tokens=[1, 2]),
    "a description that is none": lambda corpus: (corpus / "corpus.json").write_text("[" * 100_000),
    "a ledger of another kind": lambda corpus: (corpus / "ledger.jsonl").write_text("{}\n"),
}


@pytest.mark.parametrize("case", STORES)
def test_a_hostile_store_is_refused_and_nothing_is_made(folder, unheard_command, case):
    STORES[case](folder / "corpus")
    write_digests(folder / "corpus")  # as an attacker would do
    done = unheard_command(
        *("train", folder / "r" / "run.toml", "--out", folder / "new", "--set", "sampling.users_per_round=60")
    )
    assert done.status == 2
    assert len(done.said.strip().splitlines()[-1]) > 20
    assert not Path("exploded").exists()
    assert not (folder / "exploded").exists()
