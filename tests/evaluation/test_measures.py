"""Every figure of measures.json, recomputed by plain loops over windows, users and words."""

import itertools
import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import unheard
from unheard.corpus.tokenizers import WordTokenizer
from unheard.corpus.vocabulary import Vocabulary
from unheard.errors import InvalidValue
from unheard.evaluation import measures as measures_module
from unheard.evaluation.measures import (
    PROMPTS,
    Counts,
    Measured,
    Scores,
    by_band,
    by_token,
    by_user,
    full_measures,
    prompts_for,
    score_baselines,
    write_measures,
)
from unheard.evaluation.next_word import evaluate
from unheard.run_folder import RunFolder
from unheard.updates.user_update import User

BOS, EOS, UNK = range(3)
SIZE, UNROLL = 140, 7


@pytest.fixture(scope="module")
def what() -> Measured:
    rng = np.random.default_rng(3)
    model = unheard.TiedLSTM(vocabulary_size=SIZE, embedding_size=5, hidden_size=6)
    texts = [_text(rng, n) for n in (40, 3, 90, 25, 61, 1, 33)]
    return Measured(
        model=model,
        params_P=3.0 * model.initial(1),
        vocabulary=Vocabulary.of([f"w{i}" for i in range(SIZE - 3)]),
        tokenizer=WordTokenizer(),
        held_out=[User(t) for t in texts],
    )


def _text(rng: np.random.Generator, n: int) -> np.ndarray:
    words = np.minimum(rng.zipf(1.4, n) + 1, SIZE - 1)  # UNK and EOS are among them, and so are rare words
    words[rng.random(n) < 0.1] = EOS
    tokens = [BOS]
    for word in words:
        tokens += [int(word)] + ([BOS] if word == EOS else [])
    return np.array(tokens[:n])


@pytest.fixture(scope="module")
def measures(what) -> dict:
    return full_measures(what, unheard.Evaluation(max_tokens=10_000, unroll=UNROLL), prompts=["w1 w2"])


def test_text_in_another_language_is_not_continued_in_english():
    assert prompts_for({"kind": "public", "language": "de"}) == ()
    assert prompts_for({"kind": "public", "language": "en"}) == prompts_for({"kind": "private"}) == PROMPTS


@pytest.fixture(scope="module")
def rows(what) -> list[tuple[int, int, int, list[int], float]]:
    """Return (user, previous word, target, all words by decreasing score, loss) for each position."""
    found = []
    params = what.model.layout.split(what.params_P)
    for u, user in enumerate(what.held_out):
        for i in range(1, len(user.tokens)):
            target = int(user.tokens[i])
            if target == BOS:
                continue
            begin = (i - 1) // UNROLL * UNROLL
            context = torch.tensor([user.tokens[begin:i].tolist()])
            logits = what.model.logits(params, context, None)[0, -1].tolist()
            order = sorted(range(SIZE), key=lambda w: -logits[w])
            log_sum = math.log(sum(math.exp(s) for s in logits))
            found.append((u, int(user.tokens[i - 1]), target, order, log_sum - logits[target]))
    return found


def accuracy(rows, k):
    return sum(t in order[:k] and t != UNK for _, _, t, order, _ in rows) / len(rows)


def close(x):
    return pytest.approx(x, rel=1e-5)


def test_accuracy_by_token(measures, rows):
    for k in (1, 3, 5):
        assert measures["tokens"][f"accuracy_top{k}"] == close(accuracy(rows, k))
    words = [row for row in rows if row[2] != EOS]
    assert measures["tokens"]["accuracy_top1_words"] == close(accuracy(words, 1))
    loss = sum(row[4] for row in rows) / len(rows)
    assert measures["tokens"]["loss"] == close(loss)
    assert measures["tokens"]["perplexity"] == close(math.exp(loss))
    assert measures["tokens"]["tokens"] == len(rows)


def test_accuracy_by_token_is_what_training_prints(what, measures):
    assert measures["tokens"] == close(evaluate(what.model, what.params_P, what.held_out, unroll=UNROLL))


def test_accuracy_by_user(measures, rows):
    per_user = [[row for row in rows if row[0] == u] for u in sorted({row[0] for row in rows})]
    assert len(per_user) == 6  # one of seven users wrote a single token, which is not a target
    for k in (1, 3, 5):
        by_hand = sorted(accuracy(mine, k) for mine in per_user)
        found = measures["users"][f"accuracy_top{k}"]
        assert found["mean"] == close(sum(by_hand) / 6)
        assert found["p50"] == close((by_hand[2] + by_hand[3]) / 2)
        assert found["p95"] == close(by_hand[4] + 0.75 * (by_hand[5] - by_hand[4]))
        assert found["p5"] <= found["p25"] <= found["p50"] <= found["p75"] <= found["p95"]
    perplexities = [math.exp(sum(row[4] for row in mine) / len(mine)) for mine in per_user]
    assert measures["users"]["perplexity"]["mean"] == close(sum(perplexities) / 6)


def test_accuracy_by_band(measures, rows):
    bands = measures["bands"]
    assert [band["band"] for band in bands] == [
        "end of sentence",
        "ranks 1–10",
        "ranks 11–100",
        "ranks 101–137",
        "not in the dictionary",
    ]
    inside = [
        lambda t: t == EOS,
        lambda t: 3 <= t < 13,
        lambda t: 13 <= t < 103,
        lambda t: t >= 103,
        lambda t: t == UNK,
    ]
    assert sum(band["share"] for band in bands) == pytest.approx(1)
    for band, is_inside in zip(bands, inside, strict=True):
        mine = [row for row in rows if is_inside(row[2])]
        assert band["targets"] == len(mine) > 0
        for k in (1, 3, 5):
            assert band[f"accuracy_top{k}"] == close(accuracy(mine, k))
    assert bands[-1]["accuracy_top5"] == 0


def test_head_words_are_the_most_predicted_words(measures, rows):
    for head in (10, 50, 100):
        counted = Counter(
            sum(3 <= w < 3 + head for w in [w for w in order if w not in (BOS, UNK)][:10]) for *_, order, _ in rows
        )
        assert measures["head_words"][str(head)] == [counted[n] for n in range(11)]


def test_the_most_frequent_word(what, measures, rows):
    hits, loss = {1: 0, 3: 0, 5: 0}, 0.0
    for u, _, target, _, _ in rows:
        seen = counts_of_others(what, u)
        order = sorted((w for w in range(SIZE) if w not in (BOS, UNK)), key=lambda w: (-seen[w], w))
        for k in hits:
            hits[k] += target in order[:k]
        loss -= math.log((seen[target] + 1) / (sum(seen.values()) + SIZE - 1))
    found = measures["baselines"]["most frequent word"]["tokens"]
    assert {k: found[f"accuracy_top{k}"] for k in hits} == close({k: n / len(rows) for k, n in hits.items()})
    assert found["loss"] == close(loss / len(rows))


def test_the_bigram_with_back_off(what, measures, rows):
    hits, loss = {1: 0, 3: 0, 5: 0}, 0.0
    for u, before, target, _, _ in rows:
        seen, total = counts_of_others(what, u), 0
        unigram = {w: (seen[w] + 1) / (sum(seen.values()) + SIZE - 1) for w in range(1, SIZE)}
        pairs = Counter(b for a, b in pairs_of_others(what, u) if a == before)
        total, left = sum(pairs.values()), 1 - sum(unigram[w] for w in pairs)
        prob = {
            w: (pairs[w] - 0.75) / total
            if pairs[w]
            else unigram[w] * (0.75 * len(pairs) / total / left if pairs else 1.0)
            for w in unigram
        }
        assert sum(prob.values()) == pytest.approx(1)
        order = sorted((w for w in prob if w != UNK), key=lambda w: (-round(prob[w], 12), w))
        for k in hits:
            hits[k] += target in order[:k]
        loss -= math.log(prob[target])
    found = measures["baselines"]["bigram with back-off"]["tokens"]
    assert found["loss"] == close(loss / len(rows))
    assert {k: found[f"accuracy_top{k}"] for k in hits} == close({k: n / len(rows) for k, n in hits.items()})


def pairs_of_others(what, u):
    """Return the word pairs of held-out users in other folds: five folds, user i is in fold i mod 5."""
    texts = [user.tokens.tolist() for i, user in enumerate(what.held_out) if i % 5 != u % 5]
    return [(a, b) for text in texts for a, b in itertools.pairwise(text) if b != BOS]


def counts_of_others(what, u) -> Counter:
    return Counter(b for _, b in pairs_of_others(what, u))


def test_baselines_count_every_public_text_once_and_no_other_text(what, monkeypatch):
    counted, real = [], Counts.of
    monkeypatch.setattr(Counts, "of", lambda texts, size: counted.append(texts) or real(texts, size))
    public = [np.array([BOS, word, word + 1, EOS]) for word in range(5, 12)]
    score_baselines(what.held_out, public, SIZE, are_public=True)
    assert [[text.tolist() for text in texts] for texts in counted] == [[text.tolist() for text in public]]


def test_no_user_is_scored_with_counts_of_the_own_text_however_many_there_are(monkeypatch):
    counted, scored, real, targets = [], [], Counts.of, measures_module._targets
    monkeypatch.setattr(Counts, "of", lambda texts, size: counted.append([t[1] for t in texts]) or real(texts, size))
    monkeypatch.setattr(
        measures_module, "_targets", lambda users: scored.append([u.tokens[1] for _, u in users]) or targets(users)
    )
    users = [User(np.array([BOS, word, 3, EOS])) for word in range(4, 17)]
    score_baselines(users, [user.tokens for user in users], SIZE, are_public=False)
    assert sorted(itertools.chain(*scored)) == list(range(4, 17))
    assert [sorted([*others, *own]) for others, own in zip(counted, scored, strict=True)] == [list(range(4, 17))] * 5


def test_public_users_are_preferred_for_the_baselines(what, measures):
    public = [np.array([BOS, 5, 6, EOS])]
    found = full_measures(replace(what, public=public), unheard.Evaluation(unroll=UNROLL), prompts=[])
    assert found["baselines_fitted_on"] == "the corpus's public users"
    assert measures["baselines_fitted_on"] == "other held-out users"
    assert found["baselines"] != measures["baselines"]
    assert found["tokens"] == measures["tokens"]


def test_one_held_out_user_has_no_others_to_count_in(what):
    found = full_measures(replace(what, held_out=what.held_out[:1]), unheard.Evaluation(), prompts=[])
    assert found["baselines"] == {}


def test_no_held_out_text_is_refused(what):
    with pytest.raises(InvalidValue, match="held-out"):
        full_measures(replace(what, held_out=[User(np.array([BOS]))]), unheard.Evaluation())


def test_written_measures_hold_no_count_of_users(measures):
    assert set(measures["users"]["accuracy_top1"]) == {"mean", "p5", "p25", "p50", "p75", "p95"}
    text = json.dumps(measures)
    assert "num_users" not in text


def test_measures_are_these_figures_and_no_others(measures):
    """A further figure could be one of a single user, or tell how many there are."""
    accuracies = {"accuracy_top1", "accuracy_top3", "accuracy_top5"}
    figures = {"tokens", "users", "bands"}
    assert set(measures) == figures | {
        *("format", "max_tokens", "unroll", "head_words", "baselines", "baselines_fitted_on", "prompts")
    }
    for found in (measures, *measures["baselines"].values()):
        assert set(found) & figures == figures
        assert set(found["tokens"]) == accuracies | {"accuracy_top1_words", "loss", "perplexity", "tokens"}
        assert set(found["users"]) == accuracies | {"perplexity"}
        assert all(set(row) == {"mean", "p5", "p25", "p50", "p75", "p95"} for row in found["users"].values())
        for band in found["bands"]:
            assert set(band) - {"first", "last"} == accuracies | {"band", "share", "targets"}
    assert all(set(found) == figures for found in measures["baselines"].values())
    assert all(set(prompt) == {"text", "words"} for prompt in measures["prompts"])


def test_a_held_out_user_who_wrote_nothing_changes_no_measure(what, measures):
    nobody = User(np.array([BOS]))
    found = full_measures(
        replace(what, held_out=[*what.held_out, nobody]),
        unheard.Evaluation(max_tokens=10_000, unroll=UNROLL),
        prompts=["w1 w2"],
    )
    assert found == measures


def test_the_log_of_an_evaluation_names_the_run_and_no_place_or_figure(tmp_path, measures, caplog):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.model.write_bytes(b"a model")
    with caplog.at_level("INFO"):
        write_measures(folder, measures)
    assert [record.getMessage() for record in caplog.records] == ["run: measures.json written"]


def test_measures_are_of_the_newest_model_or_of_none(tmp_path, measures):
    folder = RunFolder(tmp_path)
    assert folder.read_measures() is None
    folder.model.write_bytes(b"a model")
    write_measures(folder, measures)
    assert (folder.read_measures() or {})["tokens"] == measures["tokens"]
    folder.model.write_bytes(b"a newer model")
    assert folder.read_measures() is None
    folder.measures.write_text("{")
    assert folder.read_measures() is None


@pytest.mark.parametrize("place", [0, 1 << 20, (2 << 20) - 1, 2 << 20, (2 << 20) + 8, -1])
def test_one_byte_anywhere_in_a_large_model_makes_its_measures_those_of_another(tmp_path, measures, place):
    folder = RunFolder(tmp_path)
    content = bytearray((2 << 20) + 17)
    folder.model.write_bytes(content)
    write_measures(folder, measures)
    assert folder.read_measures() is not None
    content[place] ^= 1
    folder.model.write_bytes(content)
    assert folder.read_measures() is None


def quantile(values: list[float], share: float) -> float:
    """Return a quantile with linear interpolation between the two nearest values."""
    ordered, place = sorted(values), share * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


@pytest.mark.parametrize("users", [1, 2, 3, 8, 41])
def test_every_figure_of_a_list_of_scores_by_plain_loops(users):
    """Of tokens, users and bands, also for baselines, with users of unlike lengths in any order of rows."""
    rng = np.random.default_rng(users)
    user_N = rng.permutation(np.repeat(np.arange(users) * 3, rng.integers(1, 60, users)))
    target_N = rng.choice([EOS, UNK, 3, 12, 13, 102, 103, SIZE - 1], len(user_N))
    rank_N, loss_N = rng.integers(0, 11, len(user_N)), rng.uniform(0, 9, len(user_N))
    scores = Scores(user_N=user_N, target_N=target_N, rank_N=rank_N, loss_N=loss_N)
    rows = list(zip(*(column.tolist() for column in (user_N, target_N, rank_N, loss_N)), strict=True))

    def hit(part, k):
        return sum(rank < k and target != UNK for _, target, rank, _ in part) / len(part) if part else None

    def mean_loss(part):
        return sum(row[3] for row in part) / len(part)

    words = [row for row in rows if row[1] != EOS]
    expected = {f"accuracy_top{k}": hit(rows, k) for k in (1, 3, 5)}
    expected |= {"accuracy_top1_words": hit(words, 1) or 0.0, "loss": mean_loss(rows), "tokens": len(rows)}
    assert by_token(scores) == close({**expected, "perplexity": math.exp(mean_loss(rows))})
    parts = [[row for row in rows if row[0] == user] for user in sorted(set(user_N.tolist()))]
    columns = {f"accuracy_top{k}": [hit(part, k) for part in parts] for k in (1, 3, 5)}
    columns["perplexity"] = [math.exp(mean_loss(part)) for part in parts]
    found = by_user(scores)
    assert set(found) == set(columns)
    for name, values in columns.items():
        assert found[name] == close(
            {"mean": sum(values) / len(values), **{f"p{p}": quantile(values, p / 100) for p in (5, 25, 50, 75, 95)}}
        )
    inside = {
        "end of sentence": {EOS},
        "ranks 1–10": range(3, 13),
        "ranks 11–100": range(13, 103),
        f"ranks 101–{SIZE - 3}": range(103, SIZE),
        "not in the dictionary": {UNK},
    }
    bands = by_band(scores, SIZE)
    assert [band["band"] for band in bands] == list(inside)
    assert [(band["first"], band["last"]) for band in bands[1:-1]] == [(1, 10), (11, 100), (101, SIZE - 3)]
    for band, ids in zip(bands, inside.values(), strict=True):
        part = [row for row in rows if row[1] in ids]
        assert (band["targets"], band["share"]) == (len(part), close(len(part) / len(rows)))
        assert [band[f"accuracy_top{k}"] for k in (1, 3, 5)] == [
            x if x is None else close(x) for x in (hit(part, k) for k in (1, 3, 5))
        ]


@pytest.mark.parametrize("rows", [3, 4, 13, 14, 103, 104, 1004, 10_003, 10_004])
def test_every_word_is_in_exactly_one_band(rows):
    """The last band ends at the last word; no band is empty, whatever the size of the vocabulary."""
    target_N = np.arange(1, rows)  # every target there is: all ids but BOS
    zeros_N = np.zeros(len(target_N))
    bands = by_band(Scores(user_N=zeros_N, target_N=target_N, rank_N=zeros_N, loss_N=zeros_N), rows)
    assert sum(band["targets"] for band in bands) == len(target_N)
    assert all(band["targets"] == band["last"] - band["first"] + 1 > 0 for band in bands[1:-1])
    assert [band["targets"] for band in (bands[0], bands[-1])] == [1, 1]
    ends = [0] + [band["last"] for band in bands[1:-1]]
    assert [band["first"] for band in bands[1:-1]] == [end + 1 for end in ends[:-1]]
    assert ends[-1] == rows - 3


def test_a_model_that_has_diverged_has_no_loss_and_breaks_nothing(what, tmp_path):
    lost = replace(what, params_P=torch.full_like(what.params_P, float("nan")))
    found = full_measures(lost, unheard.Evaluation(unroll=UNROLL), prompts=["w1"])
    assert found["tokens"]["loss"] is None
    assert found["prompts"] == [{"text": "w1", "words": []}]
    (tmp_path / "model.safetensors").write_bytes(b"")
    write_measures(RunFolder(tmp_path), found)
    assert RunFolder(tmp_path).read_measures()


@pytest.mark.parametrize("parameter", [0.0, float("nan")])
def test_words_that_a_model_likes_equally_are_no_hits_here_either(what, parameter):
    """The accuracy of a model must not depend on the function that measures it."""
    lost = replace(what, params_P=torch.full_like(what.params_P, parameter))
    found = full_measures(lost, unheard.Evaluation(unroll=UNROLL), prompts=[])["tokens"]
    told = evaluate(lost.model, lost.params_P, lost.held_out, unroll=UNROLL)
    assert [found[f"accuracy_top{k}"] for k in (1, 3, 5)] == [told[f"accuracy_top{k}"] for k in (1, 3, 5)] == [0, 0, 0]


def test_features_of_each_user_are_used():
    model = unheard.TiedLSTM(vocabulary_size=20, embedding_size=4, hidden_size=6, user_features=2)
    vocabulary = Vocabulary.of([f"w{i}" for i in range(17)])
    users = [User(np.arange(3, 15), np.array(f, dtype="float32")) for f in ([1, 0], [0, 1])]
    what = Measured(
        model=model, params_P=model.initial(0), vocabulary=vocabulary, tokenizer=WordTokenizer(), held_out=users
    )
    found = full_measures(what, unheard.Evaluation(unroll=5), prompts=[])
    assert found["tokens"] == close(evaluate(model, what.params_P, users, unroll=5))
