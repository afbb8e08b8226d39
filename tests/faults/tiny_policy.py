"""The smallest policy that answers: the next digit after a digit. Rebuilt by the localizer through its factory."""

import torch
from torch import nn


def policy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))
