"""Claim: on a GPU too watching costs next to nothing, a snapshot stalls for a copy, and bf16 is replayed.

    python benchmarks/gpu.py --json                 one GPU; within ten minutes
    python benchmarks/gpu.py --json --device cpu    shows that it runs

Only written: no GPU was at hand. What overhead.py measures on the CPU, with a policy of 340 M parameters in bf16
autocast and 16,384 tokens a step; every time is taken after the device has finished.

    step_ratio_median, step_ratio_ci95   watched over plain, interleaved
    stall_ratio                          what a snapshot adds to observe(), over a plain copy of the weights to the host
    cosine, norm_rel_error               of the replayed gradient against the step's own
    device                               its name, as torch tells it
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from overhead import NUM_WARM_UP, RUN, SEED, _commit, _interval, _rounded
from watching.policy import QUICK, Loop, Size

from gradloc.policy import Meter, Policy, place
from gradloc.replay import coefficients_of, replay
from gradloc.snapshot import open_snapshot
from gradloc_proto import codec, streams
from gradloc_proto.memory_bus import MemoryBus
from gradloc_proto.messages import Limits, LimitsChanged, SnapshotCommitted

LARGE = Size(vocabulary=32_768, width=1024, num_layers=24, num_rows=16, num_positions=1024, num_micro_batches=4)
NUM_PAIRS, NUM_STALLS = 200, 10


def timed(device: str, work: Callable[[], object]) -> float:
    """Seconds until the device has finished."""
    _finish(device)
    started = time.perf_counter()
    work()
    _finish(device)
    return time.perf_counter() - started


def overhead(size: Size, device: str, num_pairs: int) -> dict[str, Any]:
    plain, watched = Loop(size, None, device), Loop(size, {"run": RUN}, device)
    order = random.Random(SEED)
    ratios = []
    for pair in range(NUM_WARM_UP + num_pairs):
        seconds = {}
        for loop in order.sample([plain, watched], 2):
            seconds[loop is watched] = timed(device, partial(loop.step, pair))
        if pair >= NUM_WARM_UP:
            ratios.append(seconds[True] / seconds[False])
    assert watched.probe is not None
    watched.probe.close()
    return {
        "parameters": plain.num_parameters,
        "step_ratio_median": _rounded(statistics.median(ratios)),
        "step_ratio_ci95": _interval(ratios),
        "num_pairs": num_pairs,
    }


def snapshots(size: Size, device: str, num_stalls: int) -> dict[str, Any]:
    """Stall beside a copy to the host, then the last snapshot replayed against the gradient of its step."""
    with tempfile.TemporaryDirectory() as folder:
        bus = MemoryBus()
        limits = LimitsChanged(run_id=RUN, ts=0.0, step=0, limits=Limits(version=10**6, norm=1e-12))
        bus.append(streams.stream(RUN, "limits"), [codec.encode(limits)], length_max=10)
        loop = Loop(size, {"run": RUN, "bus": bus, "store": f"file://{folder}", "reference_after": None}, device)
        probe = loop.probe
        assert probe is not None and probe._publisher is not None and probe._writer is not None
        while probe._publisher.limits is None:
            time.sleep(0.01)
        seconds: dict[str, list[float]] = {"plain": [], "snapshot": [], "copy": []}
        observe = probe.observe
        own: dict[str, torch.Tensor] = {}

        def measured(kind: str, **metrics: float) -> None:
            def work() -> None:
                observe(**metrics)
                if kind == "copy":
                    state = loop.policy.state_dict()
                    loop.copy = {name: one.detach().to("cpu", copy=True) for name, one in state.items()}

            seconds[kind].append(timed(device, work))
            own.update({name: one.grad.clone() for name, one in loop.policy.named_parameters() if one.grad is not None})

        for number in range(num_stalls + 1):
            for kind in ("plain", "copy", "snapshot"):
                probe._writer._snapshots_left = 50 if kind == "snapshot" else 0
                probe.observe = lambda kind=kind, **metrics: measured(kind, **metrics)  # type: ignore[method-assign]
                loop.step(number)
                loop.copy = None
                probe._writer.close()
        probe.close()
        messages = [codec.decode(entry.data) for entry in bus.read_last(streams.stream(RUN, "steps"), count=10_000)]
        committed = [message for message in messages if isinstance(message, SnapshotCommitted)]
        plain, taken, copied = (statistics.median(seconds[kind][1:]) for kind in ("plain", "snapshot", "copy"))
        found = {
            "stall_ratio": _rounded((taken - plain) / (copied - plain)),
            "copy_ms": round((copied - plain) * 1e3, 2),
        }
        return found | _replayed(committed[-1].path, size, device, own)


def _replayed(path: str, size: Size, device: str, own: dict[str, torch.Tensor]) -> dict[str, Any]:
    snapshot = open_snapshot(path)
    batches = place([(snapshot.micro_batches(part.rank), part.grad_factor) for part in snapshot.manifest.parts])
    model = Loop(size, None, device).policy
    model.load_state_dict(snapshot.weights())
    autocast = None if snapshot.manifest.autocast_dtype is None else torch.bfloat16
    policy = Policy(model, Meter(1), autocast_dtype=autocast)
    gradient = replay(policy, batches, coefficients_of(batches)).gradient
    dot = sum(float((own[name].double() * one.double()).sum()) for name, one in gradient.tensors.items())
    norm = math.sqrt(sum(float(one.double().square().sum()) for one in own.values()))
    return {"cosine": dot / norm / gradient.norm, "norm_rel_error": abs(gradient.norm / norm - 1)}


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line for machines")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a tiny policy, few steps")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write(json.dumps({"benchmark": "gpu", "skipped": "no GPU that torch sees; try --device cpu"}) + "\n")
        return
    on_gpu = options.device == "cuda"
    torch.set_num_threads(1)
    size = replace(LARGE if on_gpu else QUICK, autocast=True)
    result = {
        "benchmark": "gpu",
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "commit": _commit(),
        "seed": SEED,
        **overhead(size, options.device, NUM_PAIRS if on_gpu else 5),
        **snapshots(size, options.device, NUM_STALLS if on_gpu else 2),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
