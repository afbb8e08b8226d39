"""What was measured about a step, as the diagnosis weighs it. Knows no tensor and no cause."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from gradloc.layer_growth import LayerGrowth

LOG_RATIO_CALM = math.log(2.0)


@dataclass(frozen=True)
class Evidence:
    """What was measured about the step and its leading token. None: not known."""

    norm: float
    limit: float
    kind: str  # what the search ended with: token, sequence, batch-wide, ...
    num_culprits: int
    growth: LayerGrowth
    log_ratio: float | None = None
    sequence_log_ratio: float | None = None
    largest_token_log_ratio_in_sequence: float | None = None
    median_log_ratio: float | None = None
    mean_log_ratio: float | None = None  # sizes, of all trained tokens but the worst
    mean_old_log_ratio: float | None = None  # the same against the trainer's own logp at the time of the rollout
    log_ratio_spread: float | None = None
    coefficient: float | None = None
    median_coefficient: float | None = None
    logp: float | None = None
    advantage: float | None = None
    median_advantage: float | None = None
    largest_advantage: float | None = None  # in size
    reference_log_ratio: float | None = None  # of the reference policy to the trained one, where the loss has a KL term
    coefficient_over_advantage: float | None = None
    in_mask: bool = True
    residual_rms_ratio: float | None = None
    residual_block: str | None = None
    row_scale: float | None = None
    num_other_ids: int = 0
    first_other_id: int | None = None
    other_ids_same_text: bool | None = None
    sharpness: float | None = None
    sharpness_scatter: float | None = None
    rest_share: float | None = None  # of the norm², belonging to no token, where the step's own gradient is at hand
    odd_rank: int | None = None
    odd_rank_norm: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metrics_usual: Mapping[str, float] = field(default_factory=dict)
    details: dict[str, float | str | None] = field(default_factory=dict)

    @property
    def is_calm(self) -> bool:
        """No importance ratio speaks for a mismatch of the leading token."""
        return self.log_ratio is None or abs(self.log_ratio) <= LOG_RATIO_CALM
