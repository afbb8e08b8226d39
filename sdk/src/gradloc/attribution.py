"""Attribution: every token's share of the squared gradient norm from two forward passes.

    share_i = c_i <grad logp_i, g> / ||g||^2  ~=  c_i [logp_i(theta + eps v) - logp_i(theta - eps v)] / (2 eps ||g||)

with v = g / ||g||; the shares of all tokens sum to one, which is the built-in checksum. eps adapts
to the gradient: usable values spanned five decades between measured cases (docs/algorithm.md). Where
no eps passes the checksum, forward-mode differentiation gives the same derivative without one.
Knows no limit and no culprit. Shapes: B rows, R positions with a logp.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from gradloc.perturbation import Perturbation
from gradloc.policy import PlacedBatch, Policy, active_part
from gradloc.replay import Gradient

# Wanted change of the leading token's logp, and |sum - 1| that counts as numerically sound.
# A central difference is wrong by about tau^2 / 6 and by rho / tau of rounding, rho = 1e-6 for a logp in float32:
# together least at tau = (3 rho)^(1/3) = .0144.
TAU = {torch.float32: 0.015, torch.float64: 0.015}
TAU_LOW_PRECISION = 0.3
TAU_MAX_FACTOR = 4.0  # above it logp bends
# Below it rounding speaks: in full precision logp is good to 1e-6, a thousandth of the smallest change accepted.
TAU_MIN_FACTOR = {torch.float32: 0.1, torch.float64: 0.1}
TAU_MIN_FACTOR_LOW_PRECISION = 0.25
CHECKSUM_TOLERANCE = {torch.float32: 0.005, torch.float64: 0.005}
CHECKSUM_TOLERANCE_LOW_PRECISION = 0.15
NUM_RESCALES_MAX = 6  # each moves eps by at most 100x: twelve decades in all
NUM_RETRIES_MAX = 2  # after a bad checksum, before exact derivatives
ONE_SIDED_TOLERANCE = 0.05  # of a difference to one side: it locates, exact verification follows
BENT = 0.2  # |sum - 1| of a difference to one side: logp bends, and a second forward pass would be wasted
NUM_STRAIGHTENED_MAX = 2  # each moves eps by STRAIGHTER; a real rest would never straighten
STRAIGHTER = 0.1
CURVATURE_WANTED = 0.03  # its square is about the error of a central difference
NONLINEAR = 0.1  # curvature against slope of the leading token: above it eps is too large


@dataclass(frozen=True)
class Attribution:
    """Shares by batch, float64 [B, R] each, zero where the coefficient is zero. `eps` is 0 for exact derivatives.

    `slack`: how far the sum may be from one because other tokens were left out.
    """

    shares: tuple[Tensor, ...]
    checksum: float
    eps: float
    tolerance: float
    slack: float = 0.0

    @property
    def is_sound(self) -> bool:
        """Whether the checksum is near one, measured against the largest share that entered the sum."""
        largest = max((float(share.abs().max()) for share in self.shares if share.numel()), default=0.0)
        return abs(self.checksum - 1.0) <= self.tolerance * max(1.0, largest) + self.slack


@dataclass(frozen=True)
class _Step:
    """What one value of eps gave."""

    eps: float
    plus: list[Tensor]
    minus: list[Tensor]


def attribute(
    policy: Policy,
    batches: Sequence[PlacedBatch],
    coefficients: Sequence[Tensor],
    gradient: Gradient,
    logp: Sequence[Tensor],
    *,
    one_sided: bool = False,
    slack: float = 0.0,
) -> Attribution:
    """Shares of all tokens in `gradient`, which is that of `coefficients`; `logp` as the replay computed them.

    `one_sided` asks for one forward pass where full precision allows it: good enough to locate. `slack`: part of the
    gradient that may lie outside of `coefficients`, where these were narrowed down.

    Raises ValueError when the gradient is zero or not finite: shares have no meaning then.
    """
    if not math.isfinite(gradient.norm) or gradient.norm == 0.0:
        raise ValueError(f"shares of a gradient of norm {gradient.norm} have no meaning; expected a finite one above 0")
    prober = _Prober(policy, batches, coefficients, gradient, logp, slack)
    full_precision = policy.grid in TAU
    best = prober.measure(prober.first_eps(), one_sided=one_sided and full_precision)
    if one_sided and not best.is_sound:
        best = prober.measure(best.eps)
    if full_precision and not best.is_sound:
        # Routing that flips or a logp that bends: another eps may cost more than derivatives that need none.
        best = prober.better(best)
    for _ in range(NUM_RETRIES_MAX):
        if best.is_sound:
            return best
        retry = prober.retry()
        if retry is None:
            break
        best = min(best, retry, key=lambda found: abs(found.checksum - 1.0))
    return best if best.is_sound else prober.better(best)


@dataclass(frozen=True)
class Reach:
    """How far to move: the wanted change of the leading token's logp, and the changes that will do."""

    tau: float
    low: float
    high: float

    def first_eps(self, coefficient_max: float, norm: float) -> float:
        """The eps that changes logp by tau where one token alone makes the gradient."""
        return self.tau * coefficient_max / norm

    def next_eps(self, eps: float, change: float) -> float | None:
        """Another eps when logp changed by far more or less than tau (or not to a number)."""
        size = abs(change)
        if self.low <= size <= self.high:
            return None
        scale = self.tau / size if size > 0 else math.inf
        return eps * (0.01 if math.isnan(scale) else min(max(scale, 0.01), 100.0))


def reach_of(grid: torch.dtype) -> Reach:
    """The reach for this number format."""
    tau = TAU.get(grid, TAU_LOW_PRECISION)
    return Reach(tau, tau * TAU_MIN_FACTOR.get(grid, TAU_MIN_FACTOR_LOW_PRECISION), tau * TAU_MAX_FACTOR)


def checksum_tolerance(grid: torch.dtype) -> float:
    """|sum - 1| that counts as numerically sound in this number format."""
    return CHECKSUM_TOLERANCE.get(grid, CHECKSUM_TOLERANCE_LOW_PRECISION)


def leader(coefficients: Sequence[Tensor], moved: Sequence[Tensor], base: Sequence[Tensor]) -> tuple[float, float]:
    """Largest |c * change of logp| and that change; the change is NaN when any is not finite."""
    weight, change_of_leader = -1.0, 0.0
    for coefficient, up, before in zip(coefficients, moved, base, strict=True):
        change = torch.where(coefficient != 0, up - before, 0.0)
        if not bool(torch.isfinite(change).all()):
            return math.inf, math.nan
        weighed = (coefficient * change).abs()
        if weighed.numel() and float(weighed.max()) > weight:
            weight = float(weighed.max())
            change_of_leader = float(change.flatten()[int(weighed.argmax())])
    return weight, change_of_leader


def shares_of(
    coefficients: Sequence[Tensor], up: Sequence[Tensor], down: Sequence[Tensor], eps: float, norm: float
) -> tuple[Tensor, ...]:
    """Shares from logps at +eps and -eps."""
    return tuple(
        torch.where(coefficient != 0, coefficient * (plus - minus) / (2 * eps * norm), 0.0)
        for coefficient, plus, minus in zip(coefficients, up, down, strict=True)
    )


def _exactly(
    policy: Policy,
    batches: Sequence[PlacedBatch],
    coefficients: Sequence[Tensor],
    gradient: Gradient,
    tolerance: float,
) -> Attribution | None:
    """Shares by forward-mode differentiation, without any eps; None where an operation lacks that mode."""
    # torch ships these two without types.
    make_dual: Any = forward_ad.make_dual
    unpack_dual: Any = forward_ad.unpack_dual
    shares = []
    try:
        for placed, coefficient_BR in zip(batches, coefficients, strict=True):
            share_BR = torch.zeros(coefficient_BR.shape, dtype=torch.float64)
            part = active_part(placed.batch, coefficient_BR)
            if part is not None:
                # Only the plain attention kernel has forward-mode derivatives.
                with warnings.catch_warnings(), torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
                    # torch's own table of forward-mode rules still goes through its deprecated script compiler.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    dual = {
                        name: make_dual(parameter, gradient.tensors[name].to(parameter) / gradient.norm)
                        for name, parameter in policy.parameters.items()
                    }
                    moved_BR = policy.log_probs(part.batch, to_the_end=part.to_the_end, instead=dual)
                    policy.meter.num_tokens_forward += part.num_tokens  # values and derivatives: two forwards' work
                    tangent_BR = unpack_dual(moved_BR).tangent
                derivative_BR = torch.zeros(()) if tangent_BR is None else tangent_BR.double().cpu()
                own_BR = coefficient_BR[part.rows, : part.num_columns]
                share_BR[part.rows, : part.num_columns] = own_BR * derivative_BR / gradient.norm
            shares.append(share_BR)
    except (NotImplementedError, RuntimeError):
        return None
    checksum = float(sum(float(share.sum()) for share in shares))
    return Attribution(tuple(shares), checksum, 0.0, tolerance) if math.isfinite(checksum) else None


class _Prober:
    """Moves the policy along one gradient and keeps what it saw."""

    def __init__(
        self,
        policy: Policy,
        batches: Sequence[PlacedBatch],
        coefficients: Sequence[Tensor],
        gradient: Gradient,
        logp: Sequence[Tensor],
        slack: float = 0.0,
    ) -> None:
        self._slack = slack
        self._gradient = gradient
        self._exact_tried = False
        self._exact_found: Attribution | None = None
        self._policy = policy
        self._batches = batches
        self._coefficients = coefficients
        self._norm = gradient.norm
        self._logp = logp
        self._perturbation = Perturbation(policy.parameters, gradient.tensors, gradient.norm, policy.grid)
        self._reach = reach_of(policy.grid)
        self._tolerance = checksum_tolerance(policy.grid)
        self._last: _Step | None = None
        self._direction = 0.0

    def first_eps(self) -> float:
        largest = max(float(coefficient.abs().max()) for coefficient in self._coefficients if coefficient.numel())
        return self._reach.first_eps(largest, self._norm)

    def measure(self, eps: float, *, one_sided: bool = False) -> Attribution:
        """Shares at an eps near `eps` that moves the leading token's logp by about tau."""
        plus: list[Tensor] = []
        num_straightened = 0
        for _ in range(NUM_RESCALES_MAX):
            plus = self._log_probs(eps)
            # Straightened once, logp changes by less than tau on purpose.
            change = leader(self._coefficients, plus, self._logp)[1]
            better = None if num_straightened else self._reach.next_eps(eps, change)
            if better is None and self._bends(plus, eps) and num_straightened < NUM_STRAIGHTENED_MAX:
                exact = self._exact()
                if exact is not None and exact.is_sound:
                    return exact
                num_straightened += 1
                better = eps * STRAIGHTER
            if better is None:
                break
            eps = better
        if one_sided:
            shares = shares_of(self._coefficients, plus, self._logp, eps / 2, self._norm)
            return self._found(shares, eps, ONE_SIDED_TOLERANCE)
        return self._attribution(eps, plus)

    def better(self, found: Attribution) -> Attribution:
        """Exact derivatives where there are any and they sum up better."""
        exact = self._exact()
        return exact if exact is not None and abs(exact.checksum - 1.0) < abs(found.checksum - 1.0) else found

    def _exact(self) -> Attribution | None:
        """Asked for once: what an operation lacks it will lack again."""
        if not self._exact_tried:
            self._exact_tried = True
            found = _exactly(self._policy, self._batches, self._coefficients, self._gradient, self._tolerance)
            self._exact_found = None if found is None else replace(found, slack=self._slack)
        return self._exact_found

    def _bends(self, plus: Sequence[Tensor], eps: float) -> bool:
        """Whether the sum to one side is far from one although rounding is not to blame."""
        if self._policy.grid not in TAU:
            return False
        shares = shares_of(self._coefficients, plus, self._logp, eps / 2, self._norm)
        largest = max((float(share.abs().max()) for share in shares if share.numel()), default=0.0)
        total = math.fsum(float(share.sum()) for share in shares)
        return abs(total - 1.0) > BENT * max(1.0, largest) + self._slack

    def retry(self) -> Attribution | None:
        """Shares at a smaller eps where the logp bends, at a larger one where rounding speaks; None to give up."""
        if self._last is None:
            return None
        curvature = self._curvature(self._last)
        bends = not curvature < NONLINEAR
        direction = -1.0 if bends else 1.0
        if self._direction and direction != self._direction:
            return None  # between the two lies nothing better
        self._direction = direction
        factor = min(max(CURVATURE_WANTED / curvature, 0.01), 0.25) if bends and math.isfinite(curvature) else 0.25
        eps = self._last.eps * (factor if bends else 4.0)
        return self._attribution(eps, self._log_probs(eps))

    def _attribution(self, eps: float, plus: list[Tensor]) -> Attribution:
        minus = self._log_probs(-eps)
        self._last = _Step(eps, plus, minus)
        shares = shares_of(self._coefficients, plus, minus, eps, self._norm)
        return self._found(shares, eps, self._tolerance)

    def _found(self, shares: tuple[Tensor, ...], eps: float, tolerance: float) -> Attribution:
        checksum = math.fsum(float(share.sum()) for share in shares)
        return Attribution(shares, checksum, eps, tolerance, self._slack)

    def _log_probs(self, eps: float) -> list[Tensor]:
        found = []
        with self._perturbation.moved(eps), torch.no_grad():
            for placed, coefficient_BR in zip(self._batches, self._coefficients, strict=True):
                logp_BR = torch.zeros(coefficient_BR.shape, dtype=torch.float64)
                part = active_part(placed.batch, coefficient_BR)
                if part is not None:
                    moved_BR = self._policy.log_probs(part.batch, to_the_end=part.to_the_end)
                    logp_BR[part.rows, : part.num_columns] = moved_BR.double().cpu()
                found.append(logp_BR)
        return found

    def _curvature(self, step: _Step) -> float:
        """Second difference against the first one, over all tokens by weight."""
        bend, slope = 0.0, 0.0
        for coefficient, up, down, base in zip(self._coefficients, step.plus, step.minus, self._logp, strict=True):
            active = coefficient != 0
            bend += float(torch.where(active, (coefficient * (up + down - 2 * base)).abs(), 0.0).sum())
            slope += float(torch.where(active, (coefficient * (up - down)).abs(), 0.0).sum())
        return bend / slope if slope > 0 else 0.0
