"""Two alike policies that train side by side on the same batches, one of them watched."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import gradloc


@dataclass(frozen=True)
class Size:
    """Shape of a policy and of its step: rows of positions, in micro-batches."""

    vocabulary: int
    width: int
    num_layers: int
    num_rows: int
    num_positions: int
    num_micro_batches: int
    autocast: bool = False  # bf16


LARGE = Size(vocabulary=4096, width=512, num_layers=6, num_rows=8, num_positions=128, num_micro_batches=2)
SMALL = Size(vocabulary=16, width=8, num_layers=1, num_rows=2, num_positions=4, num_micro_batches=1)
QUICK = Size(vocabulary=64, width=32, num_layers=2, num_rows=2, num_positions=16, num_micro_batches=2)


class Policy(nn.Module):
    """A causal transformer; logits [B, T, V]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width, max(size.width // 64, 1), 4 * size.width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(size.num_layers)
        )
        self.lm_head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("mask_TT", nn.Transformer.generate_square_subsequent_mask(size.num_positions))

    def forward(self, ids_BT: Tensor) -> Tensor:
        hidden = self.embed_tokens(ids_BT)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask_TT, is_causal=True)
        logits_BTV: Tensor = self.lm_head(hidden)
        return logits_BTV


class Loop:
    """A training loop as a user would write it, with gradloc's three lines where it is watched."""

    def __init__(self, size: Size, watch: dict[str, Any] | None, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.size = size
        self.policy = Policy(size).to(device)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-5)
        self.probe = None if watch is None else gradloc.watch(self.policy, self.optimizer, **watch)
        self.observed_s = 0.0  # of the last step
        self.copies = False  # the weights beside observing
        self.copy: dict[str, Tensor] | None = None

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = self.size
        for _ in range(size.num_micro_batches):
            rows = max(size.num_rows // size.num_micro_batches, 1)
            ids_BT = torch.randint(size.vocabulary, (rows, size.num_positions), generator=generator).to(self.device)
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=size.autocast):
                logits_BTV = self.policy(ids_BT)
            logp_BTV = torch.log_softmax(logits_BTV[:, :-1].float(), dim=-1)
            logp_BR = logp_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]
            rollout_logp_BR = logp_BR.detach() - 0.01
            advantage_B = torch.randn(rows, generator=generator).to(self.device)
            if self.probe is not None:
                mask_BR = torch.ones_like(logp_BR)
                self.probe.tokens(logp_BR, ids_BT, mask_BR, rollout_logp=rollout_logp_BR, advantage=advantage_B)
            ratio_BR = torch.exp(logp_BR - rollout_logp_BR)
            (-(ratio_BR * advantage_B[:, None]).mean() / size.num_micro_batches).backward()
        if self.probe is not None:
            started = time.perf_counter()
            self.probe.observe(loss=0.0, lr=1e-5)
            if self.copies:
                self.copy = {name: tensor.detach().clone() for name, tensor in self.policy.state_dict().items()}
            self.observed_s = time.perf_counter() - started
        clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.policy.parameters())
