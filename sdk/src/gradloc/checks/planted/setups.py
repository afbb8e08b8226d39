"""Healthy set-ups: whole small runs on which no check may find anything.

Each trains for some steps with real losses and asks every layer: GRPO in float32, GRPO with several
updates a rollout from a bfloat16 copy, and low-rank adapters on a frozen base with a reward model.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from gradloc.checks import advantages, gradients, losses, number_formats, ratios, token_count
from gradloc.checks.batch import BatchSettings, CheckedCollate
from gradloc.checks.data_rows import DataSettings, check_rows
from gradloc.checks.finding import CheckFinding
from gradloc.checks.memory import MemoryWatch
from gradloc.checks.optimizer_state import check_left_out, check_lr_history, check_optimizer, check_skip, check_update
from gradloc.checks.planted import gradient
from gradloc.checks.planted import reward as planted_reward
from gradloc.checks.planted.data import healthy_rows, vocabulary
from gradloc.checks.planted.gradient import SmallModel
from gradloc.checks.reward_model import check_reward_model, check_scores
from gradloc.checks.rewards import check_history, check_rewards
from gradloc.checks.rows import Row
from gradloc.checks.tokenizer_pair import check_tokenizers
from gradloc.checks.watcher import Watcher

GROUP, NUM_GROUPS, NUM_IDS = 8, 4, 32
PROMPT, RESPONSE = 4, 8
CLIP = 0.2


class _Run:
    """GRPO on a task that a small model can learn: answer with even ids. Deterministic."""

    def __init__(self, *, copy_dtype: torch.dtype, updates: int, lr: float) -> None:
        self.model = gradient.healthy_model(seed=7)
        self.trainable: nn.Module = self.model
        self.copy_dtype = copy_dtype
        self.updates = updates
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.generator = torch.Generator().manual_seed(11)
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.reward_means: list[float] = []

    @torch.no_grad()
    def sample(self) -> tuple[Tensor, Tensor]:
        """ids [B, P + R] and the copy's own logp of the responses [B, R]."""
        prompts = torch.randint(2, NUM_IDS, (NUM_GROUPS, PROMPT), generator=self.generator)
        ids_BT = prompts.repeat_interleave(GROUP, dim=0)
        logp = []
        for _ in range(RESPONSE):
            log_probs_BV = torch.log_softmax(_in_format(self.model, ids_BT, self.copy_dtype)[:, -1].float(), dim=-1)
            picked_B1 = torch.multinomial(log_probs_BV.exp(), 1, generator=self.generator)
            logp.append(log_probs_BV.gather(-1, picked_B1))
            ids_BT = torch.cat([ids_BT, picked_B1], dim=1)
        return ids_BT, torch.cat(logp, dim=1)

    def logp(self, ids_BT: Tensor) -> Tensor:
        log_probs: Tensor = torch.log_softmax(self.model(ids_BT)[:, PROMPT - 1 : -1].float(), dim=-1)
        return log_probs.gather(-1, ids_BT[:, PROMPT:, None])[..., 0]

    def steps(self, num: int) -> Iterator[CheckFinding]:
        memory = MemoryWatch()
        for step in range(num):
            yield from self._step(step)
            if step % 2:
                yield from memory.after_step()
        yield from check_lr_history(self.rates)
        yield from gradients.check_norms(self.norms)
        yield from check_history(self.reward_means)

    def _step(self, step: int) -> Iterator[CheckFinding]:
        ids_BT, rollout_logp_BR = self.sample()
        rewards_B = (ids_BT[:, PROMPT:] % 2 == 0).float().mean(dim=1)
        self.reward_means.append(float(rewards_B.mean()))
        yield from check_rewards(rewards_B.tolist(), group_size=GROUP, bounds=(0.0, 1.0), estimator="group").findings
        rewards_NG = rewards_B.view(NUM_GROUPS, GROUP)
        centred = rewards_NG - rewards_NG.mean(dim=1, keepdim=True)
        advantage_B1 = (centred / (rewards_NG.std(dim=1, keepdim=True) + 1e-4)).view(-1, 1)
        yield from advantages.check_advantages(advantage_B1[:, 0].tolist(), group_size=GROUP)
        mask_BR = torch.ones_like(rollout_logp_BR, dtype=torch.bool)
        yield from token_count.check_token_count(int(mask_BR.sum()), int(mask_BR.sum()))
        with torch.no_grad():
            old_logp_BR = self.logp(ids_BT)
        for update in range(self.updates):
            yield from self._update(
                step,
                update,
                ids_BT,
                ratios.TokenBatch(old_logp_BR, mask_BR, rollout_logp_BR, old_logp_BR),
                advantage_B1,
            )

    def _update(
        self, step: int, update: int, ids_BT: Tensor, batch: ratios.TokenBatch, advantage_B1: Tensor
    ) -> Iterator[CheckFinding]:
        assert batch.old_logp_BR is not None
        logp_BR = self.logp(ids_BT)
        logp_BR.retain_grad()
        yield from number_formats.check_logp_format(logp_BR)
        ratio_BR = torch.exp(logp_BR - batch.old_logp_BR)
        surrogate = torch.minimum(ratio_BR * advantage_B1, ratio_BR.clamp(1 - CLIP, 1 + CLIP) * advantage_B1)
        log_ratio_BR = batch.old_logp_BR - logp_BR
        kl = (torch.exp(log_ratio_BR) - log_ratio_BR - 1).mean()
        entropy = -(torch.log_softmax(self.model(ids_BT), -1).exp() * torch.log_softmax(self.model(ids_BT), -1)).sum(-1)
        parts = {"policy": -surrogate.mean(), "kl": 0.01 * kl, "entropy": -0.001 * entropy.mean()}
        loss = torch.stack(list(parts.values())).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        yield from losses.check_loss_parts({k: v.item() for k, v in parts.items()}, loss.item())
        yield from losses.check_kl(kl.item())
        yield from losses.check_entropy(entropy.mean().item(), NUM_IDS)
        clipped = ((ratio_BR - 1).abs() > CLIP).double().mean().item()
        yield from losses.check_clipping(CLIP, clipped)
        now = ratios.TokenBatch(logp_BR.detach(), batch.mask_BR, batch.rollout_logp_BR, batch.old_logp_BR)
        report = gradients.check_gradients(self.trainable.named_parameters())
        yield from report.findings
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.norms.append(norm)
        yield from ratios.check_tokens(now, grad_norm=norm, fresh=update == 0 or None)
        assert logp_BR.grad is not None
        yield from gradients.check_coefficients(logp_BR.grad, batch.mask_BR)
        yield from token_count.check_coefficients(logp_BR.grad, (advantage_B1 * ratio_BR).detach().expand_as(logp_BR))
        before = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.dim() > 1}
        self.optimizer.step()
        yield from check_update(before, {name: p.detach() for name, p in self.model.named_parameters()})
        self.optimizer.zero_grad(set_to_none=True)
        yield from check_skip(self.optimizer)
        self.rates.append(float(self.optimizer.param_groups[0]["lr"]))
        trainable = list(self.trainable.named_parameters())
        yield from check_optimizer(self.optimizer, trainable)
        yield from check_left_out(self.optimizer, trainable)


def _in_format(model: nn.Module, ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        plain: Tensor = model(ids_BT)
        return plain
    with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
        rounded: Tensor = model(ids_BT)
    return rounded


def _float32() -> Iterable[CheckFinding]:
    yield from check_rows(
        [Row(number, values) for number, values in enumerate(healthy_rows())],
        DataSettings(reward_range=(0.0, 1.0), tokens_max=64),
        vocabulary(),
    ).findings
    yield from _Run(copy_dtype=torch.float32, updates=1, lr=1e-4).steps(10)


def _off_policy() -> Iterable[CheckFinding]:
    yield from _Run(copy_dtype=torch.bfloat16, updates=3, lr=3e-4).steps(10)


class _LowRank(nn.Module):
    """The model's head with an adapter; B starts at zero, as it should in training."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 4, bias=False)
        self.lora_B = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.base_layer(hidden) + self.lora_B(self.lora_A(hidden))
        return out


def _adapters() -> Iterable[CheckFinding]:
    reward_model = planted_reward.healthy_model()
    yield from check_reward_model(reward_model, scores_std=1.0)
    yield from check_scores(reward_model, *planted_reward.padded_ids())
    yield from check_tokenizers(vocabulary(), vocabulary())
    model = gradient.healthy_model(seed=3).requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        adapted = _LowRank(model.lm_head)
    model.lm_head = adapted  # type: ignore[assignment]
    adapted.base_layer.requires_grad_(False)
    yield from _supervised(model)


def _supervised(model: SmallModel) -> Iterator[CheckFinding]:
    """Supervised steps with accumulation, a checking collate function and the in-loop watcher."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    found: list[CheckFinding] = []
    watcher = Watcher(model, optimizer, folder=Path("not-written"), every=1)
    collate = CheckedCollate(
        _collate, BatchSettings(vocabulary_size=NUM_IDS, pad_id=0, eos_id=1), on_findings=found.extend
    )
    generator = torch.Generator().manual_seed(4)
    for step in range(9):
        total = 0.0
        for _ in range(2):
            rows = [torch.randint(2, NUM_IDS, (6 + n,), generator=generator).tolist() for n in range(4)]
            batch = collate(rows)
            log_probs = torch.log_softmax(model(batch["input_ids"])[:, :-1], dim=-1)
            targets = batch["labels"][:, 1:]
            used = targets != -100
            logp = log_probs.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
            loss = -(logp * used).sum() / used.sum() / 2
            loss.backward()
            total += float(loss.detach())
        yield from watcher.before_update(step, batch=batch, loss_parts={"policy": total})
        optimizer.step()
        optimizer.zero_grad()
        del loss, logp, log_probs
        # B is zero before the first step, so A's gradient is: a dead layer then, and only then.
        yield from watcher.after_step()
    yield from found


def _collate(rows: list[list[int]]) -> dict[str, Tensor]:
    longest = max(len(row) for row in rows)
    ids_BT = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    attention_BT = (ids_BT != 0).long()
    return {
        "input_ids": ids_BT,
        "attention_mask": attention_BT,
        "labels": torch.where(attention_BT == 1, ids_BT, torch.full_like(ids_BT, -100)),
    }


SETUPS: dict[str, Callable[[], Iterable[CheckFinding]]] = {
    "GRPO in float32": _float32,
    "GRPO, three updates a rollout from a bfloat16 copy": _off_policy,
    "adapters on a frozen base": _adapters,
}
