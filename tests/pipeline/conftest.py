"""The demo's policy, trained once a session, and its moments before a fault."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gradloc.demo import task
from gradloc.demo.envelope import CHECKPOINT, FAULT_NAMES, FAULT_VARIABLE, JUDGE_VARIABLE, WEIGHTS
from gradloc.demo.model import load_weights, new_model, save_weights
from gradloc.demo.moment import Moment
from gradloc.demo.pretraining import CHECKPOINT_STEP, pretrained
from gradloc.demo.rollout import InferenceCopy
from gradloc.demo.settings import GROUP_SIZE, GROUPS_PER_RANK

SEED = 1


# Words that only a traitor would use; "mask", "nan", "two", "layer" are everyday words of the protocol.
BETRAYING = (
    *(name for name in FAULT_NAMES if "-" in name),
    *("retokeni", "hardware", "accounting", "fault", "planted", "judge", "truth", "testimony", "by_sequence"),
    *("stale", "nucleus", "flip", "shuffle", "leave_one_out", "recycled"),
    *(FAULT_VARIABLE.lower(), JUDGE_VARIABLE.lower()),
)


@pytest.fixture(scope="session")
def betraying() -> tuple[str, ...]:
    """What must not be read anywhere but in the judge's folder; compare in lower case, without "default"."""
    return BETRAYING


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights after the supervised training that precedes GRPO."""
    path = tmp_path_factory.mktemp("policy") / WEIGHTS

    def keep(step: int, model) -> None:
        if step == CHECKPOINT_STEP:
            save_weights(model, path.with_name(CHECKPOINT))

    save_weights(pretrained(SEED, keep), path)
    return path


@pytest.fixture
def checkpoint(weights: Path) -> Path:
    """The policy's state of long before."""
    return weights.with_name(CHECKPOINT)


@pytest.fixture
def policy(weights: Path):
    model = new_model(SEED)
    load_weights(model, weights)
    return model


def problems(rng: np.random.Generator) -> tuple[task.Problem, ...]:
    picked = rng.choice(task.NUM_PROMPTS, GROUPS_PER_RANK, replace=False)
    return tuple(task.problem(int(index)) for index in picked for _ in range(GROUP_SIZE))


@pytest.fixture
def moment(policy) -> Moment:
    """One rank's step, sampled and not yet used."""
    rng = np.random.default_rng(7)
    copy = InferenceCopy(policy, seed=3)
    previous = copy.sample(problems(rng))
    return Moment(25, 0, copy.sample(problems(rng)), previous, copy, policy, healthy_norm=0.8)
