"""The demo's verifiable task: sort eight digits. Prompts, rewards and the tokenizer.

A row is `<bos> 4 0 7 7 2 9 1 3 = 0 1 2 3 4 7 7 9 <eos>`. Some tokens of the vocabulary, such as a
tool's output, never occur in the training data. Knows nothing of models. Shapes: B rows, R response
positions.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

IntArray = npt.NDArray[np.int64]

RARE_TOKENS = ("<tool_output>", "<tool_error>", "<time_out>", "<image>", "<citation>", "<redacted>")
BLANK = "▁"  # also whatever else the tokenizer does not know
VOCABULARY = ("<pad>", "<bos>", "<eos>", BLANK, "=", *(str(digit) for digit in range(10)), *RARE_TOKENS)
ID_OF = {token: index for index, token in enumerate(VOCABULARY)}
PAD, BOS, EOS, EQUALS = ID_OF["<pad>"], ID_OF["<bos>"], ID_OF["<eos>"], ID_OF["="]
FIRST_DIGIT = ID_OF["0"]
RARE_IDS = tuple(ID_OF[token] for token in RARE_TOKENS)

NUM_DIGITS = 8
PROMPT_LENGTH = NUM_DIGITS + 2
RESPONSE_LENGTH = NUM_DIGITS + 2  # the digits, <eos>, and room for one token that a tool may put in
NUM_PROMPTS = 4_096  # rows of the data set


def tokenizer() -> Tokenizer:
    """A word-level tokenizer of the vocabulary; `encode` splits text into digits and bracketed tokens."""
    made = Tokenizer(WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token=BLANK))
    made.pre_tokenizer = Split(Regex(r"<\w+>|=|\d"), behavior="isolated")
    return made


@dataclass(frozen=True)
class Problem:
    """One row of the data set: `uid` names it in findings."""

    uid: str
    digits: tuple[int, ...]
    pad: ClassVar[int] = PAD
    eos: ClassVar[int] = EOS
    response_length: ClassVar[int] = RESPONSE_LENGTH

    @property
    def prompt(self) -> tuple[int, ...]:
        return (BOS, *(FIRST_DIGIT + digit for digit in self.digits), EQUALS)

    @property
    def answer(self) -> tuple[int, ...]:
        return (*(FIRST_DIGIT + digit for digit in sorted(self.digits)), EOS)

    def reward(self, response: list[int]) -> float:
        return reward(self, response)


def problem(index: int) -> Problem:
    """Row `index` of the data set; the same for every seed."""
    rng = np.random.default_rng([index, NUM_DIGITS])
    return Problem(f"sort/{index}", tuple(int(digit) for digit in rng.integers(0, 10, NUM_DIGITS)))


def reward(asked: Problem, response: list[int]) -> float:
    """Half for the share of digits in their places, half for the whole answer. What a tool put in is not judged."""
    given = [token for token in response if token not in RARE_IDS]
    if EOS in given:
        given = given[: given.index(EOS) + 1]
    wanted = asked.answer
    num_right = sum(have == want for have, want in zip(given, wanted, strict=False))
    return 0.5 * num_right / len(wanted) + 0.5 * (tuple(given) == wanted)
