"""The keyboard and `predict` with a fine-tuned language model, whose tokens are pieces of words."""

import json
import shutil
import threading
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import unheard
from unheard.corpus.vocabulary import BOS
from unheard.deployment.keyboard.server import KeyboardServer
from unheard.deployment.keyboard.suggestions import PieceSuggester, suggester_for
from unheard.deployment.model import open_model

from .conftest import model_of, run_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base, corpus):
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(corpus, folder / "corpus")  # a copy, because it is charged
    run = run_of(folder / "corpus", model_of(base, "lora"), training=unheard.Training(rounds=1))
    for _ in unheard.train(run, folder / "lora"):
        pass
    return folder / "lora"


class Reciting:
    """A stepper that predicts one fixed text, and counts the tokens that it reads."""

    def __init__(self, model, text):
        self.rows = len(model.vocabulary)
        self.words = [BOS, *model.vocabulary.encode_words(model.tokenizer.split(text)).tolist()]
        self.calls = 0

    def read_all(self, words):
        self.calls += 1
        scores = np.zeros(self.rows, dtype=np.float32)
        if list(words) == self.words[: len(words)] and len(words) < len(self.words):
            scores[self.words[len(words)]] = 9.0
        return scores


@pytest.fixture
def reciting(trained):
    model = open_model(trained)
    steps = Reciting(model, "we saw the long road today, my old piano !")
    return PieceSuggester(replace(model, stepper=steps)), steps


def first(suggestions):
    return suggestions[0].word, suggestions[0].follows


def test_words_of_several_pieces_are_suggested_whole(reciting):
    suggester, _ = reciting
    tokens = suggester.model.tokenizer
    assert max(len(tokens.split(f" {word}")) for word in ("today", "piano", "long")) > 1
    assert first(suggester.suggest("we saw the ")) == ("long", False)
    assert first(suggester.suggest("we saw the long road ")) == ("today", False)
    assert first(suggester.suggest("we saw the long road today, my ")) == ("old", False)
    assert first(suggester.suggest("we saw the long road today, my old ")) == ("piano", False)


def test_a_begun_word_is_completed_and_a_finished_one_is_followed(reciting):
    suggester, _ = reciting
    for begun in ("lo", "lon"):
        word, follows = first(suggester.suggest(f"we saw the {begun}"))
        assert word == "long"
        assert not follows
    assert first(suggester.suggest("we saw the")) == ("long", True)
    assert first(suggester.suggest("w")) == ("we", False)  # the first word has no space before it
    assert first(suggester.suggest("first line\nw")) == ("we", False)


def test_suggestions_are_words_each_once_with_their_shares(reciting):
    suggester, _ = reciting
    for text in ("", "we ", "we saw", "i like te", "(", "xqz"):
        given = suggester.suggest(text, top=5)
        words = [one.word for one in given]
        assert len({word.lower() for word in words}) == len(words)
        assert all(word and " " not in word and "Ġ" not in word for word in words)
        assert all(0 <= one.share <= 1 for one in given)
    assert suggester.suggest_ahead("we ") is None


def test_a_text_that_was_read_is_not_read_again(reciting):
    suggester, steps = reciting
    suggester.suggest("we saw the ")
    before = steps.calls
    assert before >= 1
    suggester.suggest("we saw the ")
    suggester.suggest("we saw the l")  # the same text before the word
    assert steps.calls <= before + 3 * 5
    suggester.suggest("we saw the l")
    assert steps.calls <= before + 3 * 5


def test_the_server_answers_with_the_suggestions_of_a_run(trained):
    model = open_model(trained)
    with KeyboardServer([suggester_for(model)]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            body = json.dumps({"text": "i like "}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{server.address}/suggest", body, headers)
            with urllib.request.urlopen(request, timeout=60) as reply:
                answer = json.loads(reply.read())
        finally:
            server.shutdown()
            thread.join()
    assert len(answer["suggestions"][0]) == 3
    assert answer["ahead"] == [None]


def test_predict_shows_pieces_with_the_text_before_them(trained):
    from unheard.cli.main import app

    done = CliRunner().invoke(app, ["predict", str(trained), "i like", "--top", "5"])
    assert done.exit_code == 0, done.output
    assert "i like" in done.output
    assert "Ġ" not in done.output
    done = CliRunner().invoke(app, ["predict", str(trained), "i like", "--json"])
    given = json.loads(done.output)
    model = open_model(trained)
    assert [row["word"] for row in given] == [word for word, _ in model.predict("i like")]
    assert [row["probability"] for row in given] == pytest.approx([p for _, p in model.predict("i like")], rel=1e-4)
