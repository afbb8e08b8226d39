"""Settings and bounds of the detector, each with its reason. Numbers only; knows nobody."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """How incidents live and how localizations are tried. Seconds are measured by Tick messages."""

    # Limits are multiplied by it: 2 tolerates spikes twice as large. Of runs that are new; each may override it.
    sensitivity: float = 1.0

    # Incidents.
    resolve_after_steps: int = 20  # healthy steps in a row; fewer would split one trouble into two alerts
    worsened_factor: float = 2.0  # a joining spike this much worse than the worst so far is told anew
    storm_incidents: int = 5  # so many incidents ...
    storm_window_steps: int = 400  # ... opened within so many steps are a storm ...
    storm_resolve_factor: int = 10  # ... which stays one incident until it has been calm this much longer
    skip_streak_steps: int = 5  # updates skipped in a row before that itself is alerted (and at each doubling)

    # Gaps. Steps may arrive late; a missing one is told after so many later ones or so many seconds.
    gap_grace_steps: int = 8
    gap_grace_s: float = 30.0  # with a tick every few seconds this keeps the promised minute

    # Limits. A fresh baseline moves with every step; later only what matters to a trainer is published.
    limits_every_step_until: int = 64
    limits_change: float = 0.1  # of hundreds of layers one always moves by some per cent, and that decides no spike
    limits_look_every_steps: int = 4  # comparing all layers costs as much as judging them
    limits_every_steps: int = 32  # half the age at which a trainer stops believing them

    # Localizations.
    snapshot_timeout_s: float = 300.0  # weights of a few GB to an object store take minutes
    localization_attempts_max: int = 3
    retry_backoff_s: float = 10.0
    retry_backoff_max_s: float = 300.0
    ended_grace_s: float = 20.0  # a job's end may be known before its finding has been read
    running_timeout_s: float = 3600.0  # a hung job must not hold the run's only slot for ever


DEFAULT_POLICY = Policy()

# Bounds of what one run can put into the state, whatever is written into its streams.
SENSITIVITY_RANGE = (0.1, 1000.0)
STEP_JUMP_MAX = 1_000_000  # a step this far ahead is an absurd id, not a gap
LAYERS_MAX = 512
LAYER_NAME_LENGTH_MAX = 200
LABELS_MAX = 16
INCIDENTS_KEPT_MAX = 8
SPIKES_KEPT_MAX = 4  # per incident: the first and the worst
GAPS_KEPT_MAX = 16
REQUESTS_KEPT_MAX = 16
SNAPSHOTS_KEPT_MAX = 4  # committed before their step was read
STOPS_KEPT_MAX = 4
FLAGS_MAX = 32
