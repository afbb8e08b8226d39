"""GRPO as a plain PyTorch loop, with gradloc's three lines in it.

    python examples/plain_loop.py                                  # judged in this process
    python examples/plain_loop.py --redis redis://127.0.0.1:6379/0 --store file:///data/gradloc

A small recurrent policy learns to answer with even digits: it samples several answers to each prompt from a copy of
itself that is refreshed every few steps, and the loss corrects for that by a clipped importance ratio. With --fault the
sampler's log-probability of one token is recorded wrongly at step 20, and inline mode names it.
Shapes: B rows, T positions, R response positions, V digits.
"""

import argparse
import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import gradloc

NUM_DIGITS, PROMPT_LENGTH, RESPONSE_LENGTH = 10, 4, 8
NUM_MICRO_BATCHES, NUM_PROMPTS, NUM_ANSWERS, REFRESH_STEPS = 2, 4, 4, 4
NUM_ROWS = NUM_PROMPTS * NUM_ANSWERS
FAULTY_STEP = 20


class DigitPolicy(nn.Module):
    """Logits of the next digit at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_DIGITS, 32)
        self.memory = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, NUM_DIGITS)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits_BTV: Tensor = self.head(self.memory(self.embedding(input_ids))[0])
        return logits_BTV


def response_logp(policy: nn.Module, ids_BT: Tensor) -> Tensor:
    """Log-probability of each response digit [B, R]."""
    logp_BRV = torch.log_softmax(policy(ids_BT)[:, PROMPT_LENGTH - 1 : -1], dim=-1)
    return logp_BRV.gather(-1, ids_BT[:, PROMPT_LENGTH:, None])[..., 0]


@torch.no_grad()
def rollout(policy: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Sampled rows [B, T], their logp under the sampling policy [B, R], and advantages [B]."""
    ids_BT = torch.randint(NUM_DIGITS, (NUM_PROMPTS, PROMPT_LENGTH)).repeat_interleave(NUM_ANSWERS, dim=0)
    for _ in range(RESPONSE_LENGTH):
        next_B1 = torch.multinomial(torch.softmax(policy(ids_BT)[:, -1], dim=-1), 1)
        ids_BT = torch.cat([ids_BT, next_B1], dim=1)
    reward_PA = (ids_BT[:, PROMPT_LENGTH:] % 2 == 0).float().mean(dim=1).view(NUM_PROMPTS, NUM_ANSWERS)
    advantage_PA = (reward_PA - reward_PA.mean(dim=1, keepdim=True)) / (reward_PA.std(dim=1, keepdim=True) + 1e-4)
    return ids_BT, response_logp(policy, ids_BT), advantage_PA.flatten()


def train(num_steps: int, redis: str | None, store: str | None, fault: bool) -> None:
    torch.manual_seed(0)
    policy = DigitPolicy()
    sampler = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    localize = "inline" if fault else None
    probe = gradloc.watch(policy, optimizer, run="plain-loop", redis=redis, store=store, localize=localize)
    mask_BR = torch.ones(NUM_ROWS, RESPONSE_LENGTH, dtype=torch.bool)
    for step in range(num_steps):
        losses = []
        for micro_batch in range(NUM_MICRO_BATCHES):
            ids_BT, rollout_logp_BR, advantage_B = rollout(sampler)
            if fault and (step, micro_batch) == (FAULTY_STEP, 1):
                rollout_logp_BR[int(advantage_B.argmin()), 5] -= 8.0  # a negative advantage: no clip silences it
            logp_BR = response_logp(policy, ids_BT)
            ratio_BR = torch.exp(logp_BR - rollout_logp_BR)
            gain_BR = torch.minimum(ratio_BR * advantage_B[:, None], ratio_BR.clamp(0.8, 1.2) * advantage_B[:, None])
            loss = -gain_BR.mean() / NUM_MICRO_BATCHES
            probe.tokens(logp_BR, ids_BT, mask_BR, rollout_logp=rollout_logp_BR, advantage=advantage_B)
            loss.backward()
            losses.append(loss.item())
        decision = probe.observe(loss=sum(losses))
        if decision != "go":
            sys.stdout.write(f"step {step}: {decision}\n")
        clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % REFRESH_STEPS == 0:
            sampler.load_state_dict(policy.state_dict())
    probe.close()
    even = (rollout(policy)[0][:, PROMPT_LENGTH:] % 2 == 0).float().mean().item()
    sys.stdout.write(
        f"{num_steps} steps; {even:.0%} of digits even; the loop waited {probe.stall_s:.3f} s for gradloc\n"
    )

    for finding in probe.findings:
        sys.stdout.write(f"step {finding.step}: {finding.summary}\n")
        sys.stdout.writelines(f"{cause.summary}\n" for cause in finding.causes[:1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--fault", action="store_true", help=f"record one token wrongly at step {FAULTY_STEP}")
    parser.add_argument("--redis", help="URL of the service's Redis; none: judged in this process")
    parser.add_argument("--store", help="where snapshots go, any fsspec URL")
    options = parser.parse_args()
    train(options.steps, options.redis, options.store, options.fault)


if __name__ == "__main__":
    main()
