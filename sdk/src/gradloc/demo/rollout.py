"""The inference copy: a separate bfloat16 model that samples answers and reports their logp.

As in real systems it is not the trainer's model: it is synced every step, computes in another
precision with a key/value cache, and its logp differ a little from the trainer's, which the trainer
corrects for. Shapes: B rows, T positions, P prompt, R response positions (T = P + R).
"""

import copy
import inspect
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from gradloc.demo.task import PROMPT_LENGTH

# transformers 5.2x renamed the argument and warns of the old name.
_CACHE = "cache" if "cache" in inspect.signature(Qwen3ForCausalLM.forward).parameters else "past_key_values"


class Problem(Protocol):
    """A row of a task's data set. Prompts of a task are of one length, and so is the room for answers."""

    @property
    def uid(self) -> str: ...
    @property
    def prompt(self) -> tuple[int, ...]: ...
    @property
    def pad(self) -> int: ...
    @property
    def eos(self) -> int: ...
    @property
    def response_length(self) -> int: ...
    def reward(self, response: list[int]) -> float: ...


@dataclass(frozen=True)
class Rollouts:
    """Sampled answers. `mask_BR` is true where the trainer learns: sampled tokens up to <eos>."""

    problems: tuple[Problem, ...]
    ids_BT: torch.Tensor  # int64 [B, T]
    mask_BR: torch.Tensor  # bool [B, R]
    logp_BR: torch.Tensor  # float32 [B, R], as the copy reported them; 0 outside the mask
    sampled_BR: torch.Tensor | None = None  # int64 [B, R], what logp_BR belongs to, where ids are others

    @property
    def prompt_length(self) -> int:
        return self.ids_BT.shape[1] - self.mask_BR.shape[1]

    @property
    def sampled(self) -> torch.Tensor:
        """Ids as the copy sampled them: [B, R]."""
        return self.ids_BT[:, self.prompt_length :] if self.sampled_BR is None else self.sampled_BR

    def response(self, row: int) -> list[int]:
        return [int(token) for token in self.ids_BT[row, self.prompt_length :]]

    def with_logp(self, row: int, at: int, value: float) -> "Rollouts":
        logp_BR = self.logp_BR.clone()
        logp_BR[row, at] = value
        return replace(self, logp_BR=logp_BR)


class InferenceCopy:
    """Samples with its own random numbers; `sync` copies the trainer's weights."""

    def __init__(self, model: Any, seed: int) -> None:
        self.model = copy.deepcopy(model).to(torch.bfloat16).eval()
        self._random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def sync(self, model: torch.nn.Module) -> None:
        for own, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            own.copy_(theirs)

    @torch.no_grad()
    def sample(self, problems: tuple[Problem, ...]) -> Rollouts:
        """One answer for each problem."""
        prompts_BP = torch.tensor([one.prompt for one in problems])
        ids_BT, mask_BR, logp_BR = self._continue(prompts_BP, problems[0])
        return Rollouts(problems, ids_BT, mask_BR, logp_BR)

    @torch.no_grad()
    def resume(self, rollouts: Rollouts, row: int, at: int, inserted: int, number: int = 1) -> list[Rollouts]:
        """The rollouts with a tool's token put into `row` at response position `at` and the rest sampled anew.

        So many different continuations as `number` samples give, at least one.
        """
        start = rollouts.prompt_length + at
        prefix_S = torch.cat([rollouts.ids_BT[row, :start], torch.tensor([inserted])])
        ids_KT, mask_KN, logp_KN = self._continue(prefix_S.repeat(number, 1), rollouts.problems[row])
        found: dict[tuple[int, ...], Rollouts] = {}
        for index in range(number):
            ids_BT, mask_BR, logp_BR = rollouts.ids_BT.clone(), rollouts.mask_BR.clone(), rollouts.logp_BR.clone()
            ids_BT[row] = ids_KT[index]
            mask_BR[row, at], logp_BR[row, at] = False, 0.0  # nobody sampled it: it is in the context only
            mask_BR[row, at + 1 :], logp_BR[row, at + 1 :] = mask_KN[index], logp_KN[index]
            key = tuple(int(token) for token in ids_KT[index])
            found.setdefault(key, replace(rollouts, ids_BT=ids_BT, mask_BR=mask_BR, logp_BR=logp_BR))
        return list(found.values())

    def _continue(self, prefix_BS: torch.Tensor, asked: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sample up to the row's end: ids [B, T], mask and logp of the N sampled positions [B, N]."""
        cache = DynamicCache(config=self.model.config)
        fed_BS, columns = prefix_BS, [prefix_BS]
        alive_B = torch.ones(len(prefix_BS), dtype=torch.bool)
        masks, logps = [], []
        for _ in range(len(asked.prompt) + asked.response_length - prefix_BS.shape[1]):
            logits_BV = self.model(input_ids=fed_BS, use_cache=True, **{_CACHE: cache}).logits[:, -1]
            log_probs_BV = torch.log_softmax(logits_BV.float(), dim=-1)
            token_B1 = torch.multinomial(log_probs_BV.exp(), 1, generator=self._random)
            logp_B = log_probs_BV.gather(-1, token_B1)[:, 0]
            token_B1[~alive_B] = asked.pad
            masks.append(alive_B)
            logps.append(logp_B.masked_fill(~alive_B, 0.0))
            columns.append(token_B1)
            alive_B = alive_B & (token_B1[:, 0] != asked.eos)
            fed_BS = token_B1
        return torch.cat(columns, dim=1), torch.stack(masks, dim=1), torch.stack(logps, dim=1)

    @torch.no_grad()
    def log_probs(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Log-probabilities at each response position: float32 [B, R, V]."""
        logits_BTV = self.model(input_ids=ids_BT, use_cache=False).logits
        return torch.log_softmax(logits_BTV[:, PROMPT_LENGTH - 1 : -1].float(), dim=-1)

    @torch.no_grad()
    def log_probs_after(self, contexts_NS: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the next token after each context: float32 [N, V]."""
        logits_NV = self.model(input_ids=contexts_NS, use_cache=False).logits[:, -1]
        return torch.log_softmax(logits_NV.float(), dim=-1)
