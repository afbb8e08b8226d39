"""What cannot be watched is refused by name, before training starts."""

import pytest
import torch
from torch import nn

import gradloc


def of_package(name: str, kind: type) -> type:
    """A class as that package defines one: its module is what a refusal goes by."""
    return type("Engine", (kind,), {"__module__": f"{name}.runtime.engine"})


@pytest.mark.parametrize("package", ["deepspeed", "megatron"])
def test_engines_that_keep_gradients_to_themselves_are_refused(package: str) -> None:
    model = of_package(package, nn.Linear)(2, 2)
    with pytest.raises(ValueError, match=rf"(?i)Engine of {package}.*expected DDP or FSDP2") as raised:
        gradloc.watch(model, run="x")
    assert "docs/trainers/" in str(raised.value)


@pytest.mark.parametrize("package", ["deepspeed", "megatron"])
def test_so_are_their_optimizers(package: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = of_package(package, torch.optim.SGD)(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="measured before clipping"):
        gradloc.watch(model, optimizer, run="x")


def test_a_data_parallel_model_is_refused() -> None:
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        gradloc.watch(nn.DataParallel(nn.Linear(2, 2)), run="x")
