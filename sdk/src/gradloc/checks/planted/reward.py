"""Planted faults of the reward layer."""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gradloc.checks.finding import CheckFinding
from gradloc.checks.planted import Garden
from gradloc.checks.planted.data import vocabulary
from gradloc.checks.reward_model import (
    SYMBOL_VARIANTS,
    check_reward_model,
    check_robustness,
    check_scores,
)
from gradloc.checks.rewards import check_fixed_scores, check_history, check_rewards
from gradloc.checks.tokenizer_pair import check_tokenizers
from gradloc.checks.vocabulary import Vocabulary

GARDEN = Garden()
GROUP = 8
NUM_GROUPS = 8


def healthy_rewards() -> list[Any]:
    """0/1 rewards of eight groups, two of them without variance, as is usual."""
    rng = random.Random(1)
    rewards: list[Any] = [float(rng.random() < 0.5) for _ in range(GROUP * NUM_GROUPS)]
    rewards[:GROUP] = [1.0] * GROUP
    rewards[GROUP : 2 * GROUP] = [0.0] * GROUP
    return rewards


def _values(faulty: bool, at: slice, values: Sequence[Any], **settings: Any) -> Iterable[CheckFinding]:
    rewards = healthy_rewards()
    if faulty:
        rewards[at] = values
    return check_rewards(rewards, group_size=GROUP, bounds=settings.pop("bounds", (0.0, 1.0)), **settings).findings


def _plant(code: str, name: str, at: slice, values: Sequence[Any], **settings: Any) -> None:
    GARDEN.plant(code, name)(lambda faulty: _values(faulty, at, values, **settings))


_plant("reward.not-a-number", "null in a group", slice(20, 21), [None])
_plant("reward.not-a-number", "NaN in a group", slice(20, 21), [math.nan])
_plant("reward.infinite", "an infinite reward", slice(20, 21), [math.inf])
_plant("reward.out-of-bounds", "a reward of 7 in [0, 1]", slice(20, 21), [7.0])
_plant("reward.constant", "every answer gets .8", slice(0, 64), [0.8] * 64)
_plant("reward.zero-variance-groups", "seven of eight groups alike", slice(0, 56), [1.0] * 56)
_plant(
    "reward.noise-normalised",
    "a group that differs by rounding only",
    slice(24, 32),
    [0.8, 0.8 + 2e-7, 0.8, 0.8, 0.8 - 2e-7, 0.8, 0.8, 0.8],
)
_plant("reward.advantage-outlier", "one 0 among seven 0.95, leave-one-out", slice(24, 32), [0.0, *[0.95] * 7])


@GARDEN.plant("reward.length-correlation", "longer answers always score higher")
def _length(faulty: bool) -> Iterable[CheckFinding]:
    rng = random.Random(2)
    lengths = [float(rng.randrange(50, 400)) for _ in range(64)]
    rewards = [(length / 400 if faulty else rng.random()) for length in lengths]
    return check_rewards(rewards, group_size=GROUP, bounds=(0.0, 1.0), lengths=lengths).findings


@GARDEN.plant("reward.drift", "the same texts score higher than last week")
def _drift(faulty: bool) -> Iterable[CheckFinding]:
    before = [0.1 * index for index in range(20)]
    return check_fixed_scores(before, [score + (0.05 if faulty else 0.0) for score in before])


@GARDEN.plant("reward.frozen", "twenty steps with the same mean")
def _frozen(faulty: bool) -> Iterable[CheckFinding]:
    rng = random.Random(3)
    means = [0.3 + 0.01 * rng.random() for _ in range(30)]
    return check_history(means + ([0.8] * 20 if faulty else []))


@GARDEN.plant("reward.hacked", "reward up, accuracy down")
def _hacked(faulty: bool) -> Iterable[CheckFinding]:
    rewards = [0.2 + 0.01 * step for step in range(40)]
    accuracies = [0.6 - 0.01 * step if faulty else 0.2 + 0.01 * step for step in range(40)]
    return check_history(rewards, None, accuracies)


# --- the model --------------------------------------------------------------------------------------


class _Adapted(nn.Module):
    """A linear layer with a low-rank adapter, as adapter libraries lay them out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(width, width)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(width, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, width, bias=False)})
        self.disable_adapters = False
        self.active_adapters = ["default"]

    def forward(self, hidden: Tensor) -> Tensor:
        plain: Tensor = self.base_layer(hidden)
        low: Tensor = self.lora_B["default"](self.lora_A["default"](hidden))
        return plain if self.disable_adapters else plain + low


class RewardModel(nn.Module):
    """Embedding, adapted layer, dropout, head; scores the mean of the attended positions: [B]."""

    def __init__(self, width: int = 8, num_ids: int = 400) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(num_ids, width)
        self.layer = _Adapted(width)
        self.dropout = nn.Dropout(0.1)
        self.score = nn.Linear(width, 1)
        nn.init.zeros_(self.score.bias)

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.layer(self.embed_tokens(ids_BT))))
        weight = mask_BT[..., None].to(hidden.dtype)
        pooled = (hidden * weight).sum(dim=1) / weight.sum(dim=1)
        scores: Tensor = self.score(pooled)
        return scores[:, 0]


def healthy_model() -> RewardModel:
    """In eval mode, frozen, adapter on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return RewardModel().eval().requires_grad_(False)


@GARDEN.plant("reward.model-training", "one block left in training mode")
def _training(faulty: bool) -> Iterable[CheckFinding]:
    model = healthy_model()
    model.layer.train(faulty)
    return check_reward_model(model)


@GARDEN.plant("reward.dropout-active", "dropout left on")
def _dropout(faulty: bool) -> Iterable[CheckFinding]:
    model = healthy_model()
    model.dropout.train(faulty)
    return check_reward_model(model)


@GARDEN.plant("reward.model-trainable", "the head wants gradients")
def _trainable(faulty: bool) -> Iterable[CheckFinding]:
    model = healthy_model()
    model.score.requires_grad_(faulty)
    return check_reward_model(model)


@GARDEN.plant("reward.adapter-disabled", "the guide's disable_adapter()")
def _disabled(faulty: bool) -> Iterable[CheckFinding]:
    model = healthy_model()
    model.layer.disable_adapters = faulty
    return check_reward_model(model)


@GARDEN.plant("reward.adapter-empty", "adapter weights never loaded")
def _empty(faulty: bool) -> Iterable[CheckFinding]:
    model = healthy_model()
    if faulty:
        nn.init.zeros_(model.layer.lora_B["default"].weight)  # type: ignore[arg-type]
    return check_reward_model(model)


@GARDEN.plant("reward.head-bias", "a bias of 3 where scores spread 1")
def _bias(faulty: bool) -> Iterable[CheckFinding]:
    model = healthy_model()
    nn.init.constant_(model.score.bias, 3.0 if faulty else 0.1)
    return check_reward_model(model, scores_std=1.0)


def padded_ids() -> tuple[Tensor, Tensor]:
    """Three rows of different lengths, padded on the right."""
    ids_BT = torch.tensor([[5, 6, 7, 8, 9], [11, 12, 13, 0, 0], [21, 22, 0, 0, 0]])
    return ids_BT, (ids_BT != 0).long()


@GARDEN.plant("reward.unstable-score", "dropout while scoring")
def _unstable(faulty: bool) -> Iterable[CheckFinding]:
    model = healthy_model()
    model.dropout.train(faulty)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return check_scores(model, *padded_ids())


@GARDEN.plant("reward.padding-dependent", "a mask that is not passed on")
def _padding(faulty: bool) -> Iterable[CheckFinding]:
    model = healthy_model()

    def score(ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        result: Tensor = model(ids_BT, torch.ones_like(mask_BT) if faulty else mask_BT)
        return result

    return check_scores(score, *padded_ids())


def _texts() -> list[str]:
    return [f"question {index}: " + "words and more " * (index % 7 + 2) for index in range(24)]


def _quality(text: str) -> float:
    """A stand-in for a score: depends on the question's number alone."""
    number = "".join(one for one in text.split(":")[0] if one.isdigit())
    return int(number or 0) / 10


@GARDEN.plant("reward.length-fragile", "a score that is the text's length")
def _length_fragile(faulty: bool) -> Iterable[CheckFinding]:
    def score(texts: Sequence[str]) -> list[float]:
        return [(0.0 if not text.endswith("more ") else 3.0) if faulty else _quality(text) for text in texts]

    changed = [*_texts()[:12], *[text + "end" for text in _texts()[12:18]]]
    return check_robustness(score, changed, cuts=(10,))


@GARDEN.plant("reward.symbol-fragile", "an appended [SEP] wins")
def _symbol_fragile(faulty: bool) -> Iterable[CheckFinding]:
    def score(texts: Sequence[str]) -> list[float]:
        return [_quality(text) + (9.0 if faulty and text.endswith("[SEP]") else 0.0) for text in texts]

    return check_robustness(score, _texts(), variants=SYMBOL_VARIANTS)


@GARDEN.plant("reward.paraphrase-fragile", "another wording, another order")
def _paraphrase(faulty: bool) -> Iterable[CheckFinding]:
    rng = random.Random(4)
    order = {f"describe {index}": rng.random() for index in range(24)}

    def score(texts: Sequence[str]) -> list[float]:
        return [order[text] if faulty and text in order else float(text.split()[-1]) for text in texts]

    return check_robustness(score, (), paraphrases=[(f"explain {index}", f"describe {index}") for index in range(24)])


# --- tokenizers -------------------------------------------------------------------------------------


def _pair(faulty: bool, other: Vocabulary) -> Iterable[CheckFinding]:
    mine = replace(vocabulary(), sides={"padding_side": "left", "truncation_side": "left"})
    return check_tokenizers(mine, other if faulty else mine)


@GARDEN.plant("reward.tokenizer-vocabulary", "another tokenizer's ids")
def _vocabulary(faulty: bool) -> Iterable[CheckFinding]:
    from gradloc.checks.planted.data import lossy_vocabulary

    return _pair(faulty, lossy_vocabulary())


@GARDEN.plant("reward.tokenizer-special", "another end of text")
def _special(faulty: bool) -> Iterable[CheckFinding]:
    return _pair(faulty, replace(vocabulary(), roles={**vocabulary().roles, "eos_token": "<pad>"}))


@GARDEN.plant("reward.tokenizer-padding-side", "padding on the other side")
def _padding_side(faulty: bool) -> Iterable[CheckFinding]:
    return _pair(faulty, replace(vocabulary(), sides={"padding_side": "right", "truncation_side": "left"}))


@GARDEN.plant("reward.tokenizer-truncation-side", "cut on the other side")
def _truncation_side(faulty: bool) -> Iterable[CheckFinding]:
    return _pair(faulty, replace(vocabulary(), sides={"padding_side": "left", "truncation_side": "right"}))
