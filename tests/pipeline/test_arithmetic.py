"""The language model's task: what an answer in words is worth."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from gradloc.demo.arithmetic import Sum

WORDS = ("<|im_end|>", "The", "sum", "of", "is", "37", "25", "62", "61", "124", "9999999999999999999999", "?")
EOS = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="?"))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("62", 1.0),
        ("The sum of 37 25 is 62 <|im_end|>", 1.0),
        ("62 is 61", 0.5 * (1 - 1 / 62)),
        ("124", 0.0),
        ("9999999999999999999999", 0.0),
        ("The sum is", 0.0),
        ("The <|im_end|> 62", 0.0),
        ("<|im_end|>", 0.0),
        ("", 0.0),
    ],
    ids=["right", "in words", "near", "twice as much", "absurd", "no number", "after the end", "at once", "nothing"],
)
def test_the_last_number_of_an_answer_is_what_counts(tokenizer: Tokenizer, answer: str, expected: float):
    asked = Sum("sum/0", 62, (1, 2, 3), EOS, EOS, tokenizer)
    ids = [WORDS.index(word) for word in answer.split()]
    assert asked.reward(ids) == pytest.approx(expected)
