"""Claim: judging a step and learning from it costs a trainer far less than a step, however many layers there are.

Runs the pure rules alone, on made-up healthy steps, one thread. Times are wall-clock medians.
"""

import argparse
import json
import statistics
import sys
import time

import numpy as np

from gradloc_proto import rules
from gradloc_proto.messages import StepObserved

NUM_LAYERS = (8, 64, 512)
NUM_STEPS = 200


def measure(num_layers: int) -> dict[str, object]:
    """Median microseconds of one judgement and one lesson, with a full window."""
    generator = np.random.default_rng(0)
    names = [f"{index}.mlp" for index in range(num_layers)]
    state = rules.RunState()
    judge_us, learn_us = [], []
    num_flagged = 0
    for step in range(NUM_STEPS):
        norms = generator.lognormal(0.0, 0.1, num_layers)
        message = StepObserved(
            run_id="bench",
            ts=1.0,
            step=step,
            grad_norm=float(np.linalg.norm(norms)),
            layer_norms=dict(zip(names, norms.tolist(), strict=True)),
        )
        started = time.perf_counter()
        observation = rules.observation_of(message)
        flags = rules.judge(state, observation)
        judged = time.perf_counter()
        state = rules.learn(state, observation, flags)
        learnt = time.perf_counter()
        num_flagged += bool(flags)
        if step >= NUM_STEPS // 2:
            judge_us.append((judged - started) * 1e6)
            learn_us.append((learnt - judged) * 1e6)
    return {
        "benchmark": "judging_cost",
        "num_layers": num_layers,
        "judge_us": round(statistics.median(judge_us), 1),
        "learn_us": round(statistics.median(learn_us), 1),
        "num_flagged": num_flagged,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    for num_layers in NUM_LAYERS:
        row = measure(num_layers)
        text = (
            json.dumps(row)
            if options.json
            else "{num_layers:4d} layers: judge {judge_us} us, learn {learn_us} us".format(**row)
        )
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
