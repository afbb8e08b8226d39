"""A training process of test_failures.py, watched or not: alone, or one of two over gloo of which one dies or pauses.

Writes what it lived to see: a line a step with its loss, then `done` and a digest of the weights.
"""

import argparse
import hashlib
import os
import resource
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradloc

NUM_STEPS, STRUCK_STEP = 24, 18
FILE_SIZE_MAX = 2_000  # bytes: manifests of parts fit, batches and weights do not


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store")
    parser.add_argument("--redis")
    parser.add_argument("--watched", action="store_true")
    parser.add_argument("--struck", choices=["kill", "pause", "disk"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    if options.struck == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE_MAX, FILE_SIZE_MAX))
    torch.manual_seed(0)
    policy: nn.Module = nn.Sequential(nn.Embedding(11, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 11))
    if world_size > 1:
        policy = DistributedDataParallel(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    probe = (
        gradloc.watch(policy, optimizer, run="failing", redis=options.redis, store=options.store)
        if options.watched
        else None
    )
    generator = torch.Generator().manual_seed(10 + rank)
    with (options.out / f"rank-{rank}.txt").open("w", buffering=1) as log:
        for step in range(NUM_STEPS):
            ids_BT = torch.randint(0, 11, (4, 6), generator=generator)
            if step == STRUCK_STEP and rank == 1:
                if options.struck == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if options.struck == "pause":
                    log.write("pausing\n")
                    os.kill(os.getpid(), signal.SIGSTOP)
            logp_BR = torch.log_softmax(policy(ids_BT)[:, :-1], -1).gather(-1, ids_BT[:, 1:, None])[..., 0]
            weight_BR = torch.randn(logp_BR.shape, generator=generator)
            if step == STRUCK_STEP - 1:
                weight_BR[0, 0] = 1e4  # a spike, so that there is something to write
            if probe is not None:
                probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR))
            loss = -(weight_BR * logp_BR).mean()
            loss.backward()
            if probe is not None:
                probe.observe(loss=loss.item())
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            log.write(f"{step} {loss.item()!r}\n")
        if probe is not None:
            probe.close()
        weights = b"".join(value.detach().numpy().tobytes() for value in policy.state_dict().values())
        log.write(f"done {hashlib.sha256(weights).hexdigest()}\n")
    # What gloo's threads still do must not decide how this process ends.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
