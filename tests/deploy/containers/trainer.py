"""A trainer for a cluster under test: a tiny model, and one token whose logp the sampler misreported once.

    python trainer.py RUN STORE STEPS SPIKE    # Redis from GRADLOC_REDIS_URL

Prints where the token is, and how many messages were dropped. Shapes: B rows, T positions, R response positions.
"""

import json
import os
import sys
import time

import torch

import gradloc
from gradloc.demo import task
from gradloc.demo.model import new_model

ROW, POSITION = 5, 7


def main(run: str, store: str, num_steps: int, spike: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = new_model(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    redis = os.environ["GRADLOC_REDIS_URL"]
    probe = gradloc.watch(model, optimizer, run=run, redis=redis, store=store, tokenizer=task.tokenizer())
    for step in range(num_steps):
        ids_BT = torch.randint(5, 15, (8, task.PROMPT_LENGTH + task.RESPONSE_LENGTH))
        logits_BRV = model(input_ids=ids_BT, use_cache=False).logits[:, task.PROMPT_LENGTH - 1 : -1]
        logp_BR = torch.log_softmax(logits_BRV, -1).gather(-1, ids_BT[:, task.PROMPT_LENGTH :, None])[..., 0]
        rollout_logp_BR = logp_BR.detach().clone()
        advantage_B = torch.tensor([1.0, -1.0] * 4)
        if step == spike:
            rollout_logp_BR[ROW, POSITION] -= 8.0
        ratio_BR = torch.exp(logp_BR - rollout_logp_BR)
        loss = -(ratio_BR * advantage_B[:, None]).mean()
        probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR), rollout_logp=rollout_logp_BR, advantage=advantage_B)
        loss.backward()
        probe.observe(loss=loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
    probe.close()
    told = {"step": spike, "sequence": ROW, "token": task.PROMPT_LENGTH + POSITION, "dropped": probe.num_events_dropped}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
