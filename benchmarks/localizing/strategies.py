"""One localization, scored against the truth and measured: cost in steps, CPU and memory beside one step's."""

import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from localizing.faults import LIMIT_OVER_HEALTHY, Case, place_of
from localizing.published import FACTORS, Published
from localizing.step import Step, run
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradloc.fidelity import StepFacts
from gradloc.localization import localize
from gradloc.replay import coefficients_of
from gradloc.verification import Place

STRATEGIES = ("attribution", "bisection", "published")
GIVEN_G = ("attribution", "verification", "bisection")  # stages counted as the search, the gradient being given
_T = TypeVar("_T")


@dataclass(frozen=True)
class Outcome:
    """`exact`: verdict and set as in the truth. `first`: the first culprit is one of them."""

    exact: bool
    first: bool
    num_false: int
    num_missed: int
    verdict: str
    steps: float
    steps_whole: float
    cpu_s: float
    checksum: float | None = None
    share_error: float | None = None
    certified: bool = False


def strategy_outcome(case: Case, strategy: str) -> Outcome:
    return _published(case) if strategy == "published" else _ours(case, strategy)


def facts_of(case: Case) -> StepFacts:
    step = case.step
    return StepFacts(
        step=1,
        grad_norm=step.norm,
        layer_norms=step.layer_norms,
        limit=case.limit,
        healthy_norm=step.healthy_norm,
        healthy_layer_norms=step.healthy_layer_norms,
    )


def _ours(case: Case, strategy: str) -> Outcome:
    policy = case.step.policy()
    started = time.process_time()
    finding = localize(
        policy, case.step.placed, facts_of(case), strategy="attribution" if strategy == "attribution" else "bisect"
    )
    cpu_s = time.process_time() - started
    places = [place_of(case.step.placed, c.rank, c.micro_batch, c.sequence, c.token) for c in finding.culprits]
    share_error = None
    if case.oracle is not None:
        shares = case.oracle.shares()
        known = [abs(c.share - shares[p]) for c, p in zip(finding.culprits, places, strict=True) if c.share_is_exact]
        share_error = max(known, default=None)
    blamed = finding.verdict in ("token", "sequence", "layer", "mask", "non-finite")
    return _score(
        case,
        finding.verdict,
        places if blamed else [],
        steps=sum(policy.meter.stages.get(name, 0.0) for name in GIVEN_G),
        steps_whole=policy.meter.steps,
        cpu_s=cpu_s,
        checksum=finding.checksum,
        share_error=share_error,
        certified=finding.certificate is not None and finding.certificate.holds,
    )


def _published(case: Case) -> Outcome:
    """Under the threshold that suits it best: fewest mistakes, then cheapest."""
    return min(
        (_published_under(case, factor) for factor in FACTORS), key=lambda o: (not o.exact, not o.first, o.steps)
    )


def _published_under(case: Case, factor: float) -> Outcome:
    policy = case.step.policy()
    coefficients = coefficients_of(case.step.placed)
    started = time.process_time()
    # Its healthy norm is what the limit says it is, forced or not.
    healthy = case.limit / LIMIT_OVER_HEALTHY
    found = Published(policy, case.step.placed, coefficients, healthy, factor).search()
    cpu_s = time.process_time() - started
    verdict = "token" if found else "batch-wide"
    # It has no words for layers and numbers that are not finite: the token alone counts as right there.
    if found and case.verdict in ("layer", "non-finite"):
        verdict = case.verdict
    return _score(case, verdict, found, steps=policy.meter.steps, steps_whole=policy.meter.steps + 1.0, cpu_s=cpu_s)


def _score(case: Case, verdict: str, places: list[Place], **measured: Any) -> Outcome:
    if case.rows:
        found_rows = {place[:2] for place in places}
        wrong, missed = found_rows - case.rows, case.rows - found_rows
        first = bool(places) and (places[0] == case.first if case.first else places[0][:2] in case.rows)
    else:
        wrong, missed = set(places) - case.tokens, case.tokens - set(places)
        first = bool(places) and places[0] in case.tokens
    expects_nobody = not case.rows and not case.tokens
    return Outcome(
        exact=verdict == case.verdict and not wrong and not missed,
        first=verdict == case.verdict if expects_nobody else first,
        num_false=len(wrong),
        num_missed=len(missed),
        verdict=verdict,
        **measured,
    )


def step_cpu_s(step: Step) -> float:
    started = time.process_time()
    run(step.model, step.placed, step.autocast)
    return time.process_time() - started


class _Live(TorchDispatchMode):
    """Bytes of tensors alive that were made inside, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._seen:
                    self._seen.add(key)
                    size = storage.nbytes()
                    self.now += size
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._forget, key, size)
        return out

    def _forget(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def peak_bytes(work: Callable[[], object]) -> int:
    with _Live() as live:
        work()
    return live.peak


def memory_ratio(case: Case, strategy: str) -> float:
    """Peak of live tensors of a localization over that of a step, both beside the weights."""
    return peak_bytes(lambda: strategy_outcome(case, strategy)) / max(
        1, peak_bytes(lambda: run(case.step.model, case.step.placed, case.step.autocast))
    )


def finite(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
