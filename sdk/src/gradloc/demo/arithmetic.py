"""The language model's verifiable task: the sum of two numbers, asked for in words and answered in words.

Numbers have two digits, and SmolLM2's tokenizer gives each digit a token, so that all prompts are of one length.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

NUM_PROMPTS = 4_096  # rows of the data set
RESPONSE_LENGTH = 16
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Sum:
    """A row: what is asked, as tokens, and what is right."""

    uid: str
    wanted: int
    prompt: tuple[int, ...]
    pad: int
    eos: int
    tokenizer: Any = field(repr=False, compare=False)
    response_length: int = RESPONSE_LENGTH

    def reward(self, response: list[int]) -> float:
        """1 for the sum as the answer's last number, at most half for one that is near it, none without a number."""
        given = response[: response.index(self.eos)] if self.eos in response else response
        numbers = _NUMBER.findall(self.tokenizer.decode(given))
        if not numbers:
            return 0.0
        last = int(numbers[-1][:9])
        return 1.0 if last == self.wanted else 0.5 * max(0.0, 1.0 - abs(last - self.wanted) / self.wanted)


def problem(index: int, tokenizer: Any) -> Sum:
    """Row `index` of the data set; the same for every seed."""
    one, other = (int(number) for number in np.random.default_rng([index, 2]).integers(10, 100, 2))
    text = f"<|im_start|>user\nWhat is {one} + {other}?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tuple(int(token) for token in tokenizer(text)["input_ids"])
    eos = int(tokenizer.eos_token_id)
    return Sum(f"sum/{index}", one + other, prompt, eos, eos, tokenizer)
