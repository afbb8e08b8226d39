"""A trainer without a network: publishes steps, now and then a spike, by gradloc's own publisher.

Writes each step down before it is published ("attempt step spike"), so that what was lost is known later.

    python trainer.py URL RUN ATTEMPT FIRST_STEP NUM_STEPS RATE SEED TRUTH SPIKE_EVERY
"""

import random
import signal
import sys
import time
from pathlib import Path

from gradloc.publisher import Publisher
from gradloc_proto.messages import RunEnded, RunStarted, StepObserved
from gradloc_proto.redis_bus import RedisBus

LAYERS = ("layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp")
CALM_STEPS = 40  # of an attempt, before its first spike


def is_spike(seed: int, run: str, attempt: int, number: int, every: float) -> bool:
    """Whether the attempt's step of this number is one, as on average each `every`th; the same for whoever asks."""
    return number >= CALM_STEPS and random.Random(f"{seed}/{run}/{attempt}/{number}").random() < 1 / every


def observed(run: str, attempt: int, step: int, norm: float, spike: bool, num_dropped: int) -> StepObserved:
    return StepObserved(
        run_id=run,
        attempt=attempt,
        ts=time.time(),
        step=step,
        grad_norm=norm,
        layer_norms=dict.fromkeys(LAYERS, norm / 2),
        num_tokens=1_000,
        rules_hit=("norm",) if spike else (),
        num_events_dropped=num_dropped,
    )


def main(arguments: list[str]) -> None:
    url, run, attempt, first, num, rate, seed, truth, spike_every = arguments
    bus = RedisBus(url)
    publisher = Publisher(bus, run)
    dice = random.Random(f"{seed}/{run}/{attempt}")
    asked_to_stop = False

    def stop(*_: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    publisher.put(RunStarted(run_id=run, attempt=int(attempt), ts=time.time(), layer_names=LAYERS, world_size=1))
    step = int(first)
    due = time.monotonic()
    with Path(truth).open("a", buffering=1) as lines:
        for number in range(int(num)):
            if asked_to_stop:
                break
            spike = is_spike(int(seed), run, int(attempt), number, float(spike_every))
            norm = dice.lognormvariate(0.0, 0.1) * (dice.uniform(50, 500) if spike else 1.0)
            lines.write(f"{attempt} {step} {int(spike)}\n")
            publisher.put(observed(run, int(attempt), step, norm, spike, publisher.num_dropped))
            step += 1
            due += 1 / float(rate)
            time.sleep(max(0.0, due - time.monotonic()))
    publisher.put(RunEnded(run_id=run, attempt=int(attempt), ts=time.time(), step=max(step - 1, 0)))
    publisher.close(timeout_s=60.0)
    bus.close()


if __name__ == "__main__":
    main(sys.argv[1:])
