"""What a snapshot says of itself: the documents `manifest.json` and `parts/rank-N.json`.

Later versions may add fields, which are not read; `version` says whether the rest means the same.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gradloc.model_inputs import Layout

FORMAT = "gradloc-snapshot"
VERSION = 1


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class FileRecord(_Document):
    num_bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class InputRecord(_Document):
    """One further input of the model: how its entries belong to sequences (`model_inputs.Belonging`)."""

    layout: Layout
    counts: tuple[int, ...] = ()
    shape: tuple[int, ...]
    dtype: str


class InputsRecord(_Document):
    placeholders: dict[str, int] = {}  # ids that stand for pictures, by modality
    unusable: str | None = None  # why they are not here
    inputs: dict[str, InputRecord] = {}


class MicroBatchRecord(_Document):
    uids: tuple[str, ...] = ()
    temperature: float = 1.0
    packed: bool = False
    inputs: InputsRecord | None = None


class RankPart(_Document):
    """What one rank wrote. `grad_factor` takes raw coefficients to the step's gradient (1/world size
    under data-parallel averaging): g = sum over ranks of grad_factor * sum_i c_i grad logp_i."""

    rank: int = Field(ge=0)
    grad_factor: float
    micro_batches: tuple[MicroBatchRecord, ...]
    files: dict[str, FileRecord]


class Manifest(_Document):
    format: Literal["gradloc-snapshot"] = "gradloc-snapshot"
    version: int = VERSION
    run_id: str
    attempt: int
    step: int
    created_at: float
    world_size: int = Field(ge=1)
    grad_norm: float
    layer_norms: dict[str, float] = {}
    limit: float | None = None
    healthy_norm: float | None = None
    healthy_layer_norms: dict[str, float] = {}
    held_at: str | None = None  # the highest layer that LayerClip held positions back from: the norms are without them
    rank_norms: tuple[float, ...] = ()  # each rank's own, where every rank holds the whole gradient
    metrics: dict[str, float] = {}  # lr, reward_mean, ... of the step, mean over ranks
    metrics_usual: dict[str, float] = {}  # their medians over the steps before
    weights: Literal["before-update", "after-update", "reference", "none"] = "before-update"
    model_config_hf: dict[str, Any] | None = None
    architecture: str | None = None
    model_factory: str | None = None
    weights_at: str | None = None  # where weights is "none": the checkpoint that they are, or come after
    weights_fingerprint: dict[str, tuple[float, float]] = {}
    tied_weights: dict[str, str] = {}
    parameter_dtype: str = "float32"
    autocast_dtype: str | None = None
    compute_dtype: str | None = None  # that sharded parameters are cast to for forward and backward
    head: Literal["plain", "wide", "scaled"] = "plain"
    attention: str | None = None
    training_mode: bool = True
    loss_scale: float = 1.0
    versions: dict[str, str] = {}
    parts: tuple[RankPart, ...]
    files: dict[str, FileRecord] = {}

    @property
    def num_bytes(self) -> int:
        records = [*self.files.values(), *(r for part in self.parts for r in part.files.values())]
        return sum(record.num_bytes for record in records)
