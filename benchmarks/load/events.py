"""Steps of made-up runs as bytes, 64 layers each: healthy noise from a seed, and spikes of a hundred times."""

import numpy as np

from gradloc_proto import codec
from gradloc_proto.messages import RunStarted, StepObserved

NUM_LAYERS = 64
NUM_SHAPES = 64  # different steps; runs take them in turns, each from another one on
_RUN, _STEP, _TS = "R-U-N", 4_242_424_242, 1_234_567.5


class Events:
    """`step` makes the bytes of a step; only run, number and time differ from one of NUM_SHAPES prepared ones."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self._healthy = [_parts(generator, 1.0) for _ in range(NUM_SHAPES)]
        self._spikes = [_parts(generator, 100.0) for _ in range(NUM_SHAPES)]
        self.num_bytes = len(self.step("run-0000", 1_000, 1_000_000.0))

    def started(self, run: str) -> bytes:
        return codec.encode(RunStarted(run_id=run, ts=1.0))

    def step(self, run: str, number: int, ts: float, *, is_spike: bool = False, shape: int | None = None) -> bytes:
        shapes = self._spikes if is_spike else self._healthy
        parts = shapes[(number if shape is None else shape) % NUM_SHAPES]
        return parts[0] + run.encode() + parts[1] + str(ts).encode() + parts[2] + str(number).encode() + parts[3]


def _parts(generator: np.random.Generator, factor: float) -> list[bytes]:
    """A step's bytes around run, time and number."""
    norms = factor * generator.lognormal(0.0, 0.1, NUM_LAYERS)
    message = StepObserved(
        run_id=_RUN,
        ts=_TS,
        step=_STEP,
        grad_norm=float(np.linalg.norm(norms)),
        layer_norms={f"layers.{i // 2}.{('attention', 'mlp')[i % 2]}": norm for i, norm in enumerate(norms.tolist())},
        num_tokens=16_384,
        energy=factor * factor * float(generator.lognormal(0.0, 0.1)),
        ratio_max=1.5,
        ratio_min=0.5,
        loss=0.1,
        reward_mean=float(generator.normal(0.5, 0.1)),
        reward_std=0.1,
        kl=0.01,
        entropy=1.0,
        lr=1e-6,
        step_s=1.0,
    )
    parts = []
    rest = codec.encode(message)
    for mark in (_RUN, _TS, _STEP):
        before, _, rest = rest.partition(str(mark).encode())
        parts.append(before)
    return [*parts, rest]
