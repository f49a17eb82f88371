"""The guarantee of a run in sentences."""

import math

import pytest

from tests.report.making import with_statement
from unheard.report.plain_language import describe_promise


@pytest.mark.parametrize(
    ("epsilon", "grade", "text"),
    [
        (math.log(3), "moderate", "more than 3 times as likely"),
        (
            math.log(3),
            "moderate",
            "right at most 75.1 times in 100",
        ),  # 75 and a little for delta: rounded up, never down
        (math.log(2.001), "strong", "more than 2.01 times as likely"),
        (0.1, "strong", "right at most 52.6 times in 100"),
        (20.0, "weak", "promises little"),
    ],
)
def test_the_promise_in_words(compared, epsilon, grade, text):
    private = compared.records[1]
    statement = {**private.statement, "claimed": {"epsilon": epsilon, "accountant": "pld"}, "delta": 1e-4}
    words = describe_promise(with_statement(private, statement))
    assert words.grade == grade
    assert text in " ".join(words.paragraphs)
