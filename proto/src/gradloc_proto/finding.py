"""What a localization found: the culprits, the proof, the cause, the fix and what it cost.

A part of LocalizationFinished; knows nothing of how it was found.
"""

from typing import Literal

from pydantic import Field

from gradloc_proto.parts import Count, Evidence, Part, ShortText, TokenRef, Verdict


class Culprit(TokenRef):
    """A token (or, where `token` is that of the largest share, a sequence) that made the spike."""

    token_id: Count | None = None
    token_text: ShortText | None = None
    uid: ShortText | None = None
    share: float
    norm: float | None = None
    share_is_exact: bool = False
    layer: ShortText | None = None
    coefficient: float | None = None
    logp: float | None = None
    ratio: float | None = None
    advantage: float | None = None


class Certificate(Part):
    """The measured norm of the step without the culprits, next to the limit: the proof."""

    grad_norm: float
    norm_without: float
    limit: float
    holds: bool
    num_culprits: Count
    num_tokens_lower_bound: Count | None = None
    minimal: bool = False
    # Where the culprits leave the loss (their ratios with them) instead of being masked in its gradient.
    norm_without_relossed: float | None = None


class Fidelity(Part):
    """How well the replay reproduced the step.

    healthy_rel_error: what the replay of the run's healthy reference deviated by, where it was asked. again_norm,
    elsewhere_norm: of further replays, on the same device and on another, where the first did not match. held_at: the
    highest layer that the trainer's LayerClip held positions back from; the replay holds nothing back, so the norms
    differ and the errors are those of the layers above.
    """

    reported_norm: float
    replayed_norm: float
    rel_error: float
    layer_rel_error_max: float | None = None
    tolerance: float
    reproduced: bool
    healthy_rel_error: float | None = None
    again_norm: float | None = None
    elsewhere_norm: float | None = None
    held_at: ShortText | None = None


class Cause(Part):
    """Why, with the numbers it rests on. `confidence` is one of low, medium, high."""

    name: ShortText
    confidence: Literal["low", "medium", "high"]
    summary: ShortText
    evidence: dict[str, Evidence] = Field(default_factory=dict)


class Fix(Part):
    """A remedy and the measured norm of the step under it."""

    name: ShortText
    norm_after: float
    holds: bool


class Cost(Part):
    """Work of a localization; one step = forward + backward of the whole batch."""

    steps: float
    num_forwards: Count = 0
    num_backwards: Count = 0
    seconds: float = 0.0


class Profile(Part):
    """Share of the culprit sequence's squared gradient by layer (rows) and position (columns)."""

    layers: tuple[str, ...]
    first_position: Count
    values: tuple[tuple[float, ...], ...]
    residual_rms: tuple[float, ...] = ()
    residual_rms_median: tuple[float, ...] = ()


class SequenceView(Part):
    """The culprit's sequence for reading: ids, texts and shares by position, cut to a window."""

    rank: Count
    micro_batch: Count
    sequence: Count
    first_position: Count
    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...] = ()
    shares: tuple[float, ...]


class Finding(Part):
    verdict: Verdict
    strategy: Literal["attribution", "bisect"]
    step: Count
    summary: ShortText
    culprits: tuple[Culprit, ...] = ()
    # Tokens whose ratio made the coefficients of others large: the cause, where culprits are the contributors.
    origins: tuple[Culprit, ...] = ()
    share: float | None = None
    checksum: float | None = None
    rest_share: float | None = None
    certificate: Certificate | None = None
    fidelity: Fidelity
    causes: tuple[Cause, ...] = ()
    fix: Fix | None = None
    healthy_norm: float | None = None
    approximate: bool = False  # the weights had moved when its batch was kept: norms and shares are not the step's own
    layer_growth: dict[str, float] = Field(default_factory=dict)
    layers_exploding: tuple[str, ...] = ()
    module_kinds_exploding: tuple[str, ...] = ()
    profile: Profile | None = None
    sequence_view: SequenceView | None = None
    shares_by_sequence: tuple[tuple[int, int, int, float], ...] = ()
    cost: Cost


def without_text(finding: Finding) -> Finding:
    """The finding without text of prompts and answers and without names of samples: places, ids and numbers remain."""
    view = finding.sequence_view
    return finding.model_copy(
        update={
            "culprits": tuple(_bare(culprit) for culprit in finding.culprits),
            "origins": tuple(_bare(culprit) for culprit in finding.origins),
            "sequence_view": None if view is None else view.model_copy(update={"token_texts": ()}),
        }
    )


def _bare(culprit: Culprit) -> Culprit:
    return culprit.model_copy(update={"token_text": None, "uid": None})
