"""Published rules for spikes of the gradient norm, re-implemented from their descriptions, beside this detector.

A rule sees one value after another, causally, and says of each whether it is a spike. Warm-ups and
constants are those of the publications. Knows nothing of labels.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from gradloc_proto import rules


class Rule(Protocol):
    def flags(self, norm: float, reward: float | None = None) -> bool: ...


class Constant:
    """norm > 10, the clip-and-alert constant of many recipes. Not-finite counts."""

    def __init__(self, threshold: float = 10.0):
        self._threshold = threshold

    def flags(self, norm: float, reward: float | None = None) -> bool:
        return not norm <= self._threshold


class ZClip:
    """ZClip (Kumar et al. 2025): z-score against EMAs of mean and variance, fed with the clipped norm."""

    def __init__(self, alpha: float = 0.97, z: float = 2.5, num_warmup: int = 25):
        self._alpha, self._z, self._num_warmup = alpha, z, num_warmup
        self._first: list[float] = []
        self._mean, self._variance = 0.0, 0.0

    def flags(self, norm: float, reward: float | None = None) -> bool:
        if len(self._first) < self._num_warmup:
            self._first.append(norm)
            self._mean, self._variance = float(np.mean(self._first)), float(np.var(self._first))
            return False
        deviation = math.sqrt(self._variance) + 1e-6 if self._variance >= 0 else math.nan
        z = (norm - self._mean) / deviation
        is_spike = z > self._z
        clipped = self._mean + self._z**2 / z * deviation if is_spike else norm
        self._mean = self._alpha * self._mean + (1 - self._alpha) * clipped
        self._variance = self._alpha * self._variance + (1 - self._alpha) * (clipped - self._mean) ** 2
        return is_spike


class SkipStep:
    """OLMo-core's SkipStepOptimizer: above mean + 6 deviations of the last 128, spikes included.

    "Not (value - mean <= 6 deviations)" skips, so one NaN in the window skips every step.
    """

    def __init__(self, window: int = 128, sigma: float = 6.0):
        self._values: deque[float] = deque(maxlen=window)
        self._window, self._sigma = window, sigma

    def flags(self, norm: float, reward: float | None = None) -> bool:
        is_spike = False
        if len(self._values) >= max(2, self._window // 2):
            values = np.fromiter(self._values, float)
            is_spike = not norm - values.mean() <= self._sigma * values.std(ddof=1)
        self._values.append(norm)
        return is_spike


class SpamLike:
    """SPAM (Huang et al. 2025) on the whole gradient: g² above 50 times its second moment; clipped to it."""

    def __init__(self, theta: float = 50.0, beta: float = 0.999, num_warmup: int = 10):
        self._theta, self._beta, self._num_warmup = theta, beta, num_warmup
        self._moment, self._num = 0.0, 0

    def flags(self, norm: float, reward: float | None = None) -> bool:
        square = min(norm, 1e150) ** 2
        moment = self._moment / (1 - self._beta**self._num) if self._num else math.nan
        is_spike = self._num >= self._num_warmup and square > self._theta * moment
        self._moment = self._beta * self._moment + (1 - self._beta) * (self._theta * moment if is_spike else square)
        self._num += 1
        return is_spike


class LogMad:
    """Median and median absolute deviation of the logarithms of the last 128, six deviations."""

    def __init__(self, window: int = 128, num_deviations: float = 6.0, num_warmup: int = 25):
        self._logs: deque[float] = deque(maxlen=window)
        self._num_deviations, self._num_warmup = num_deviations, num_warmup

    def flags(self, norm: float, reward: float | None = None) -> bool:
        if not math.isfinite(norm):
            return True
        if norm <= 0:
            return False
        log, is_spike = math.log(norm), False
        if len(self._logs) >= self._num_warmup:
            logs = np.fromiter(self._logs, float)
            middle = float(np.median(logs))
            is_spike = log > middle + self._num_deviations * 1.4826 * float(np.median(np.abs(logs - middle)))
        self._logs.append(log)
        return is_spike


class Megatron:
    """Megatron-LM's rerun state machine: 10 times the largest of the first 100 results; not-finite counts."""

    def __init__(self, factor: float = 10.0, num_samples: int = 100):
        self._factor, self._num_samples = factor, num_samples
        self._largest, self._num = 0.0, 0

    def flags(self, norm: float, reward: float | None = None) -> bool:
        if not math.isfinite(norm):
            return True
        if self._num < self._num_samples:
            self._num += 1
            self._largest = max(self._largest, norm)
            return False
        return norm >= self._factor * self._largest


class Cusum:
    """Page's one-sided CUSUM of the log norm (k = 0.5, h = 5), standardised by the last 64; starts anew at an alarm."""

    def __init__(self, k: float = 0.5, h: float = 5.0, window: int = 64, num_warmup: int = 25):
        self._k, self._h, self._num_warmup = k, h, num_warmup
        self._logs: deque[float] = deque(maxlen=window)
        self._sum = 0.0

    def flags(self, norm: float, reward: float | None = None) -> bool:
        if not math.isfinite(norm):
            return True
        if norm <= 0:
            return False
        log, is_spike = math.log(norm), False
        if len(self._logs) >= self._num_warmup:
            logs = np.fromiter(self._logs, float)
            self._sum = max(0.0, self._sum + (log - logs.mean()) / (logs.std() + 1e-9) - self._k)
            is_spike = self._sum > self._h
            self._sum = 0.0 if is_spike else self._sum
        self._logs.append(log)
        return is_spike


class TwiceTheLargest:
    """More than twice the largest and four times the median of the last 32 accepted; the simple rule to beat."""

    def __init__(self, window: int = 32, num_warmup: int = 10):
        self._accepted: deque[float] = deque(maxlen=window)
        self._flagged: list[float] = []
        self._num_warmup = num_warmup

    def flags(self, norm: float, reward: float | None = None) -> bool:
        if not math.isfinite(norm):
            return True
        if norm <= 0:
            return False
        if len(self._accepted) >= self._num_warmup:
            values = np.fromiter(self._accepted, float)
            if norm > 2 * values.max() and norm > 4 * np.median(values):
                self._flagged.append(norm)
                if len(self._flagged) >= 3:  # three in a row are a new level
                    self._accepted.extend(self._flagged)
                    self._flagged.clear()
                return True
        self._flagged.clear()
        self._accepted.append(norm)
        return False


class Gradloc:
    """This detector: the very rules that trainer and service apply."""

    def __init__(self, sensitivity: rules.Sensitivity = rules.DEFAULT_SENSITIVITY):
        self._state = rules.RunState(sensitivity=sensitivity)
        self._step = 0

    def flags(self, norm: float, reward: float | None = None) -> bool:
        observation = rules.Observation(self._step, norm, None, (), np.zeros(0), reward=reward)
        found = rules.judge(self._state, observation)
        self._state = rules.learn(self._state, observation, found)
        self._step += 1
        return bool(found)


GRADLOC = "gradloc"
RULES: dict[str, Callable[[], Rule]] = {
    GRADLOC: Gradloc,
    "constant 10": Constant,
    "ZClip": ZClip,
    "OLMo-core SkipStep": SkipStep,
    "SPAM-like": SpamLike,
    "log-MAD": LogMad,
    "Megatron": Megatron,
    "CUSUM": Cusum,
    "2x largest of 32": TwiceTheLargest,
}
