"""The verifiable task: what is asked, what is right, and how tokens read."""

import pytest

from gradloc.demo import task


def test_the_right_answer_earns_everything_and_a_wrong_one_part_of_it():
    asked = task.problem(3)
    right = list(asked.answer)
    swapped = [right[1], right[0], *right[2:]]
    assert task.reward(asked, right) == 1.0
    assert task.reward(asked, [task.PAD] * 10) == 0.0
    assert task.reward(asked, []) == 0.0
    if right[0] != right[1]:
        assert 0 < task.reward(asked, swapped) < 0.5


def test_what_a_tool_put_in_is_not_judged():
    asked = task.problem(3)
    with_tool = [*asked.answer[:2], task.RARE_IDS[0], *asked.answer[2:]]
    assert task.reward(asked, with_tool) == 1.0


def test_nothing_after_the_end_counts():
    asked = task.problem(3)
    assert task.reward(asked, [*asked.answer, task.PAD]) == 1.0
    assert task.reward(asked, [task.EOS, *asked.answer]) < 0.5


def test_a_problem_is_the_same_for_everyone():
    assert task.problem(11) == task.problem(11)
    assert task.problem(11).digits != task.problem(12).digits
    assert len(task.problem(11).prompt) == task.PROMPT_LENGTH


@pytest.mark.parametrize("token", task.VOCABULARY)
def test_every_token_has_its_text(token: str):
    assert task.tokenizer().id_to_token(task.ID_OF[token]) == token
    assert task.tokenizer().decode([task.ID_OF[token]]) == token


def test_text_becomes_a_prompt():
    asked = task.problem(5)
    text = "<bos>" + "".join(str(digit) for digit in asked.digits) + "="
    assert task.tokenizer().encode(text).ids == list(asked.prompt)
