"""Attribution: every token's share of the squared gradient norm from two forward passes.

    share_i = c_i <grad logp_i, g> / ||g||^2  ~=  c_i [logp_i(theta + eps v) - logp_i(theta - eps v)] / (2 eps ||g||)

with v = g / ||g||; the shares of all tokens sum to one, which is the built-in checksum. eps adapts
to the gradient, row by row: usable values spanned five decades between measured cases (docs/algorithm.md).
The pass at -eps is for the rows whose bend matters; where the sum is still not one, forward-mode differentiation
gives the same derivative without any eps, for the rows that bend most.
Knows no limit and no culprit. Shapes: B rows, R positions with a logp, N of them with a coefficient.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradloc.policy import PlacedBatch, Policy
from gradloc.replay import Gradient
from gradloc.row_probe import Row, RowProbe

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
# Aimed at; what is further off is looked at again where that can help.
CHECKSUM_AIM = {torch.float32: 0.001, torch.float64: 0.001}
ONE_SIDED_TOLERANCE = 0.05  # of a difference to one side: it locates, exact verification follows
ONE_SIDED_TOLERANCE_LOW_PRECISION = 0.3
NUM_SCOUTED_MAX = 3  # forward passes of one row, to find eps before the whole batch is moved
NUM_ROWS_SCOUTED_MIN = 4  # with fewer rows one of them costs too much
NUM_RESCALES_MAX = 6  # of rows that moved too far; each moves eps by at most 100x: twelve decades in all
BEND_LEFT = 2.5e-4  # of the squared norm: what rows without a pass at -eps may be wrong by together
WILD = 2.5e-3  # of the squared norm: a row that moved too far and may be wrong by more is moved again
CURVATURE_WANTED = 0.03  # second difference over first; its square is about the error of a central difference
NONLINEAR = 0.1  # above it eps is too large, below it rounding is to blame
NUM_RETRIES_MAX = 2  # at another eps, where an operation has no forward-mode derivative
NUM_STRAIGHTENED_LOW_PRECISION = 1  # times: what the worst rows' derivatives do not mend is the arithmetic's
_ENDLESS = 1e30  # stands for what is not finite in sums


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
    return _Prober(policy, batches, coefficients, gradient, logp, one_sided=one_sided, slack=slack).found()


def attribute_exactly(
    policy: Policy, batches: Sequence[PlacedBatch], coefficients: Sequence[Tensor], gradient: Gradient, *, slack: float
) -> Attribution | None:
    """Shares by forward-mode differentiation alone; None where an operation of the model has no such mode."""
    derivatives = (probe := RowProbe(policy, batches, coefficients, gradient)).derivatives(probe.rows)
    if derivatives is None:
        return None
    shares = [torch.zeros_like(coefficient) for coefficient in coefficients]
    for (batch, row), derivative_R in derivatives.items():
        own_R = coefficients[batch][row]
        shares[batch][row] = torch.where(own_R != 0, own_R * derivative_R / gradient.norm, 0.0)
    checksum = math.fsum(float(share.sum()) for share in shares)
    return Attribution(tuple(shares), checksum, 0.0, checksum_tolerance(policy.grid), slack)


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


class _Track:
    """What one row did: coefficients and logps of its tokens with a coefficient, float64 [N]."""

    def __init__(self, coefficient_R: Tensor, base_R: Tensor, norm: float) -> None:
        self.at = (coefficient_R != 0).nonzero().squeeze(-1)
        self.coefficient_N = coefficient_R[self.at]
        self.base_N = base_R[self.at]
        self._norm = norm
        self.eps = math.nan
        self.up_N = self.base_N
        self.down_N: Tensor | None = None
        self.derivative_N: Tensor | None = None

    @property
    def change_N(self) -> Tensor:
        return self.up_N - self.base_N

    @property
    def shares_N(self) -> Tensor:
        if self.derivative_N is not None:
            return self.coefficient_N * self.derivative_N / self._norm
        if self.down_N is not None:
            return self.coefficient_N * (self.up_N - self.down_N) / (2 * self.eps * self._norm)
        return self.coefficient_N * self.change_N / (self.eps * self._norm)

    @property
    def size(self) -> float:
        return float(self.shares_N.abs().max())

    @property
    def lead(self) -> float:
        """Change of logp of the token with the largest |c * change|; NaN when any is not finite."""
        return leader([self.coefficient_N], [self.up_N], [self.base_N])[1]

    @property
    def bend(self) -> float:
        """What a difference to one side may be wrong by, as a share: a logp's second derivative is about the square
        of its first."""
        return _finite(float((self.coefficient_N.abs() * self.change_N.square()).sum()) / (self.eps * self._norm))

    @property
    def unevenness(self) -> float:
        """The measured second difference, as a share; none for exact derivatives, endless with one side only."""
        if self.derivative_N is not None:
            return 0.0
        if self.down_N is None:
            return _ENDLESS
        second_N = self.coefficient_N * (self.up_N + self.down_N - 2 * self.base_N)
        return _finite(float(second_N.abs().sum()) / (2 * self.eps * self._norm))

    @property
    def curvature(self) -> float:
        """Second difference over first."""
        size = _finite(float(self.shares_N.abs().sum()))
        return min(_ENDLESS, self.unevenness / size) if size > 0 else 0.0


def _finite(value: float) -> float:
    """Sums of these stay numbers."""
    return min(value, _ENDLESS) if not math.isnan(value) else _ENDLESS


class _Prober:
    """Moves the policy along one gradient, row by row where rows differ, and keeps what it saw."""

    def __init__(
        self,
        policy: Policy,
        batches: Sequence[PlacedBatch],
        coefficients: Sequence[Tensor],
        gradient: Gradient,
        logp: Sequence[Tensor],
        *,
        one_sided: bool,
        slack: float,
    ) -> None:
        self._probe = RowProbe(policy, batches, coefficients, gradient)
        self._coefficients = coefficients
        self._norm = gradient.norm
        self._slack = slack
        self._one_sided = one_sided
        self._full_precision = policy.grid in TAU
        self._reach = reach_of(policy.grid)
        self._tolerance = checksum_tolerance(policy.grid)
        one_sided_tolerance = ONE_SIDED_TOLERANCE if self._full_precision else ONE_SIDED_TOLERANCE_LOW_PRECISION
        self._aim = one_sided_tolerance if one_sided else CHECKSUM_AIM.get(policy.grid, self._tolerance)
        self._num_retries = 0
        self._num_straightened = 0
        self._tracks = {
            (batch, row): _Track(coefficients[batch][row], logp[batch][row], self._norm)
            for batch, row in self._probe.rows
        }

    def found(self) -> Attribution:
        self._move(self._tracks, self._scouted_eps())
        self._rescale()
        if not self._one_sided:
            self._mirror(self._bent())
            if self._is_off():
                self._straighten(lambda track: track.down_N is not None and track.curvature > CURVATURE_WANTED)
        if self._is_off():
            self._mirror(self._tracks)
            self._straighten(lambda _track: True)
        shares = [torch.zeros_like(coefficient) for coefficient in self._coefficients]
        for (batch, row), track in self._tracks.items():
            shares[batch][row, track.at] = track.shares_N
        leading = max(self._tracks.values(), key=lambda track: track.size)
        eps = leading.eps if leading.derivative_N is None else 0.0
        tolerance = max(self._tolerance, self._aim) if self._one_sided else self._tolerance
        return Attribution(tuple(shares), self._checksum(), eps, tolerance, self._slack)

    def _checksum(self) -> float:
        return math.fsum(float(track.shares_N.sum()) for track in self._tracks.values())

    def _is_off(self, tolerance: float | None = None) -> bool:
        """Whether the sum is further from one than aimed at: in 32 bits in full, else against the largest share.
        Or whether it is further than that tolerance, against the largest share."""
        largest = max(1.0, *(track.size for track in self._tracks.values()))
        absolute = tolerance is None and self._full_precision and not self._one_sided
        allowed = (self._aim if tolerance is None else tolerance) * (1.0 if absolute else largest)
        return not abs(self._checksum() - 1.0) <= allowed + self._slack

    def _move(self, rows: Iterable[Row], eps: float) -> None:
        for row, up_R in self._probe.moved(list(rows), eps).items():
            track = self._tracks[row]
            track.eps, track.up_N, track.down_N = eps, up_R[track.at], None

    def _scouted_eps(self) -> float:
        """An eps that moves the leading token of the row with the largest coefficient by about tau."""
        scout = max(self._tracks, key=lambda row: float(self._tracks[row].coefficient_N.abs().max()))
        eps = self._reach.first_eps(float(self._tracks[scout].coefficient_N.abs().max()), self._norm)
        if len(self._tracks) < NUM_ROWS_SCOUTED_MIN:
            return eps
        for _ in range(NUM_SCOUTED_MAX):
            self._move([scout], eps)
            better = self._reach.next_eps(eps, self._tracks[scout].lead)
            if better is None:
                break
            eps = better
        return eps

    def _rescale(self) -> None:
        """Moves again: single rows that moved too far, and all where the leading one moved too little."""
        for _ in range(NUM_RESCALES_MAX):
            again: dict[float, list[Row]] = {}
            for row, track in self._tracks.items():
                better = self._reach.next_eps(track.eps, track.lead)
                if better is not None and better < track.eps and track.bend > WILD:
                    again.setdefault(_coarse(better / track.eps) * track.eps, []).append(row)
            if not again:
                leading = max(self._tracks.values(), key=lambda track: track.size)
                better = self._reach.next_eps(leading.eps, leading.lead)
                if better is None or better < leading.eps:
                    return
                again = {better: list(self._tracks)}
            for eps, rows in again.items():
                self._move(rows, eps)

    def _bent(self) -> list[Row]:
        """The rows that need the other side too, for the rest of them to be wrong by next to nothing."""
        order = sorted(self._tracks, key=lambda row: -self._tracks[row].bend)
        if not self._full_precision:
            return order
        left = 0.0
        for count in range(len(order), 1, -1):
            left += self._tracks[order[count - 1]].bend
            if left > BEND_LEFT:
                return order[:count]
        return order[:1]

    def _mirror(self, rows: Iterable[Row]) -> None:
        again: dict[float, list[Row]] = {}
        for row in rows:
            track = self._tracks[row]
            if track.down_N is None and track.derivative_N is None:
                again.setdefault(track.eps, []).append(row)
        for eps, chosen in again.items():
            for row, down_R in self._probe.moved(chosen, -eps).items():
                self._tracks[row].down_N = down_R[self._tracks[row].at]

    def _straighten(self, is_wanted: Callable[[_Track], bool]) -> None:
        """Exact derivatives for the worst of the wanted rows, until the sum is as aimed at or what is left cannot
        matter; other values of eps where an operation has no forward-mode derivative."""
        while self._is_off():
            doubts = {row: track.unevenness for row, track in self._tracks.items() if is_wanted(track)}
            doubts = {row: doubt for row, doubt in doubts.items() if doubt > 0}
            total = math.fsum(doubts.values())
            # A row that moved so far that its logp saturates looks harmless: where the sum would not do, go on.
            if not doubts or (total <= self._aim / 4 and not self._is_off(self._tolerance)):
                return
            chosen: list[Row] = []
            covered = 0.0
            for row in sorted(doubts, key=lambda row: -doubts[row]):
                chosen.append(row)
                covered += doubts[row]
                if covered >= total / 2:
                    break
            if not self._full_precision:
                if self._num_straightened == NUM_STRAIGHTENED_LOW_PRECISION:
                    return
                self._num_straightened += 1
            derivatives = self._probe.derivatives(chosen)
            if derivatives is not None:
                before = self._checksum()
                for row, derivative_R in derivatives.items():
                    self._tracks[row].derivative_N = derivative_R[self._tracks[row].at]
                if not self._full_precision and abs(self._checksum() - before) <= self._aim / 4:
                    return  # the worst of them were right already: what is left is the arithmetic's
            elif self._num_retries < NUM_RETRIES_MAX:
                self._num_retries += 1
                self._retry(list(doubts))
            else:
                return

    def _retry(self, rows: Sequence[Row]) -> None:
        """A smaller eps where logp bends, a larger one where rounding speaks; kept where the sum is nearer to one."""
        checksum = self._checksum()
        before = {row: (track.eps, track.up_N, track.down_N) for row, track in self._tracks.items() if row in rows}
        again: dict[float, list[Row]] = {}
        for row in rows:
            track = self._tracks[row]
            bends = track.curvature >= NONLINEAR
            factor = min(max(CURVATURE_WANTED / track.curvature, 0.01), 0.25) if bends else 4.0
            again.setdefault(_coarse(factor) * track.eps, []).append(row)
        for eps, chosen in again.items():
            self._move(chosen, eps)
        self._mirror(rows)
        if not abs(self._checksum() - 1.0) <= abs(checksum - 1.0):
            for row, (eps, up_N, down_N) in before.items():
                track = self._tracks[row]
                track.eps, track.up_N, track.down_N = eps, up_N, down_N


def _coarse(factor: float) -> float:
    """A power of four not above it, so that rows of like needs run together."""
    return float(4.0 ** math.floor(math.log(factor, 4.0)))
