"""Every random draw of the package is in the table of docs/random-draws.md, with its key, its freshness and its test.

The source is scanned for calls that make a generator, ask for a stream, draw from a generator, or seed a library. A call
that is in no row of its file fails the test, as does a row without such a call.
"""

import ast
import re
from pathlib import Path

import unheard

ROOT = Path(__file__).parents[2]
SRC = Path(unheard.__file__).parent
PAGE = (ROOT / "docs" / "random-draws.md").read_text()
ROWS = re.findall(r"^\| [^|]+ \| `([\w/]+\.py)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", PAGE, re.MULTILINE)
TESTS = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
MAKERS = {"secure_generator", "reproducible_generator", "split_stream", "SecureStreams", "ReproducibleStreams"}
MAKERS |= {"AESCounter", "Philox", "PCG64", "default_rng", "urandom", "uuid4", "Generator", "fork_rng", "manual_seed"}
MAKERS |= {"generator_from_key", "noise_key", "groups_key", "round_keys"}
MAKERS |= {"SystemRandom", "RandomState", "SeedSequence", "MT19937", "SFC64", "ChaCha", "Random", "seed"}
MAKERS |= {"token_hex", "token_bytes", "token_urlsafe", "randbelow", "generate_private_key", "generate_key"}
DRAWS = {
    "standard_normal",
    "integers",
    "binomial",
    "choice",
    "permutation",
    "permuted",
    "shuffle",
    "random",
    "random_raw",
}
DRAWS |= {"geometric", "poisson", "exponential", "laplace", "uniform", "uniform_", "normal", "normal_", "rand", "randn"}
DRAWS |= {"randint", "randperm", "rand_like", "randn_like", "bernoulli", "bernoulli_", "multinomial", "randbytes"}
DRAWS |= {"sample", "randrange", "getrandbits", "gauss", "normalvariate", "expovariate", "triangular"}
DRAWS |= {"standard_exponential", "standard_gamma", "gamma", "beta", "logistic", "gumbel", "hypergeometric"}
STREAMS = {"sampling", "batches", "noise", "count"}
HANDED_ON = (MAKERS - {"Generator", "Random", "seed", "groups_key", "noise_key", "token_bytes"}) | {
    "standard_normal",
    "random_raw",
    "permutation",
    "binomial",
}
"""Names that also count as a draw if they are passed on without a call, to a thread or as a default."""


def draws_of(path: Path) -> set[str]:
    """Return the names of functions in a file that create a generator, request a stream or draw, called or passed on."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            whole = ast.unparse(node.func)
            last = whole.split(".")[-1]
            is_library = re.fullmatch(r"(random|secrets|np\.random)\.\w+", whole)  # whatever is called there
            if is_library or last in MAKERS | DRAWS or (last in STREAMS and "streams." in whole):
                names.add(last)
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            names |= {node.attr if isinstance(node, ast.Attribute) else node.id} & HANDED_ON
    return names


def test_every_draw_is_in_the_table_and_every_row_is_a_draw():
    listed: dict[str, set[str]] = {}
    for file, calls, *_ in ROWS:
        listed.setdefault(file, set()).update(re.findall(r"`(\w+)`", calls))
    scanned = {path.relative_to(SRC).as_posix(): draws_of(path) for path in sorted(SRC.rglob("*.py"))}
    scanned = {file: names for file, names in scanned.items() if names}
    wrong = {
        file: sorted(scanned.get(file, set()) ^ listed.get(file, set()))
        for file in scanned.keys() | listed.keys()
        if scanned.get(file, set()) != listed.get(file, set())
    }
    assert wrong == {}, "list these calls in docs/random-draws.md, with their key, freshness and test"


def test_every_row_names_a_test_that_exists():
    named = [name for *_, tests in ROWS for name in re.findall(r"`(test_\w+)`", tests)]
    assert len(ROWS) > 20
    assert [name for name in named if f"def {name}(" not in TESTS] == []
    assert [row for row in ROWS if not re.search(r"`test_\w+`", row[-1]) and "not private" not in row[-2]] == []
