"""One step of a run: judged by the shared rules, told as a spike or as calm, learnt from, limits published.

Pure. The trainer and the detector apply the same rules (gradloc_proto.rules), but the trainer decides
with limits that may be some steps old, and its decision is authoritative: a step it flagged is a
spike even where the detector's own judgement is milder. A decision "snapshot" without a rule is a
wish or a healthy reference, not a spike.
"""

import math
from dataclasses import replace

from gradloc_detector import incidents, sequence
from gradloc_detector.policy import FLAGS_MAX, LAYER_NAME_LENGTH_MAX, LAYERS_MAX, Policy
from gradloc_detector.state import Book, DetectorState, Effects, Emit
from gradloc_proto import rules
from gradloc_proto.identities import spike_id
from gradloc_proto.messages import Flag, Limits, LimitsChanged, SnapshotRequested, Spike, StepObserved

_TRAINER_RULES_MAX = 8


def observed(state: DetectorState, message: StepObserved, policy: Policy) -> tuple[DetectorState, Effects]:
    """`state` after a step that is new; what it opens, joins, resolves and publishes."""
    book, effects = sequence.arrived(state.book, message, policy)
    observation = rules.observation_of(_bounded(message, state.baselines))
    limits = rules.limits_of(state.baselines)
    own = rules.judge(state.baselines, observation)
    flags = (*own, *_trainer_flags(message, own, limits))

    book, streak_flags = _skips(book, message, policy)
    if flags or streak_flags:
        spike = _spike(book, message, (*flags, *streak_flags)[:FLAGS_MAX], limits)
        book, more = incidents.struck(book, spike, policy, score=spike.flags[0].score, is_alert=bool(streak_flags))
        if rules.is_about_gradient(own) and message.decision == "go" and not book.ended:
            # The trainer let it pass (no limits yet, or old ones): ask for what its ring still holds.
            more = (*more, Emit("control", _request(book, message.step, rules.shows_in_later_batches(own))))
    else:
        book, more = incidents.calmed(book, policy)
    effects += more

    # A spike inside the detector's own warm-up that only the trainer could see must not become the baseline.
    if own or not flags or limits.norm is not None:
        learnt = rules.learn(state.baselines, observation, own)
        if learnt.version < state.baselines.version:  # a late step; readers keep the highest version
            learnt = replace(learnt, version=state.baselines.version)
        state = replace(state, baselines=learnt)
    book, more = published(book, state.baselines, message.step, policy)
    return replace(state, book=book), effects + more


def _bounded(message: StepObserved, known: rules.RunState) -> StepObserved:
    """`message` with no more layers than a state may hold, whatever was sent."""
    names = known.layer_names
    if message.layer_norms.keys() <= known.rows.keys():
        return message
    if len(message.layer_norms) + len(names) <= LAYERS_MAX and not any(
        len(name) > LAYER_NAME_LENGTH_MAX for name in message.layer_norms
    ):
        return message
    room = LAYERS_MAX - len(names)
    watched = set(names)
    for name in message.layer_norms:
        if name not in watched and room > 0 and len(name) <= LAYER_NAME_LENGTH_MAX:
            watched.add(name)
            room -= 1
    layers = {name: value for name, value in message.layer_norms.items() if name in watched}
    return message.model_copy(update={"layer_norms": layers})


def _trainer_flags(message: StepObserved, own: tuple[Flag, ...], limits: Limits) -> tuple[Flag, ...]:
    """Flags for the rules that the trainer saw broken and the detector did not."""
    hit = message.rules_hit[:_TRAINER_RULES_MAX]
    if not hit and message.decision == "skip":
        hit = ("skip",)
    seen = {flag.rule for flag in own}
    return tuple(_trainer_flag(rule[:100], message, limits) for rule in dict.fromkeys(hit) if rule not in seen)


def _trainer_flag(rule: str, message: StepObserved, limits: Limits) -> Flag:
    series, value, baseline = "norm", message.grad_norm, limits.healthy_norm
    limit = message.limit if message.limit is not None else limits.norm
    if rule == "layer" and limits.healthy_layers:
        name = max(
            limits.healthy_layers, key=lambda name: message.layer_norms.get(name, 0.0) / limits.healthy_layers[name]
        )
        if name in message.layer_norms:
            series, value, baseline = name, message.layer_norms[name], limits.healthy_layers[name]
            limit = limits.layers.get(name)
    return Flag(
        rule=f"trainer:{rule}",
        series=series,
        value=value,
        score=_score(value, baseline, limit),
        baseline=baseline,
        limit=limit,
    )


def _score(value: float, baseline: float | None, limit: float | None) -> float:
    if not math.isfinite(value):
        return math.inf
    for reference in (baseline, limit):
        if reference is not None and math.isfinite(reference) and reference > 0:
            return value / reference
    return 1.0


def _skips(book: Book, message: StepObserved, policy: Policy) -> tuple[Book, tuple[Flag, ...]]:
    """A streak of skipped updates is an alert of its own, told at its start and at each doubling."""
    streak = book.skip_streak + 1 if message.decision == "skip" else 0
    if streak == book.skip_streak:
        return book, ()
    book = book.model_copy(update={"skip_streak": streak})
    ratio, rest = divmod(streak, policy.skip_streak_steps)
    if streak == 0 or rest or ratio & (ratio - 1):
        return book, ()
    limit = float(policy.skip_streak_steps)
    return book, (Flag(rule="skip-streak", series="decision", value=streak, score=streak / limit, limit=limit),)


def _spike(book: Book, message: StepObserved, flags: tuple[Flag, ...], limits: Limits) -> Spike:
    return Spike(
        spike_id=spike_id(book.run_id, book.attempt, message.step, flags[0].rule),
        step=message.step,
        grad_norm=message.grad_norm,
        healthy_norm=limits.healthy_norm,
        limit=message.limit if message.rules_hit and message.limit is not None else limits.norm,
        flags=flags,
        snapshot=message.snapshot,
    )


def _request(book: Book, step: int, or_newest: bool) -> SnapshotRequested:
    return SnapshotRequested(
        run_id=book.run_id, attempt=book.attempt, ts=book.last_ts, step=step, by="detector", or_newest=or_newest
    )


def published(book: Book, state: rules.RunState, step: int, policy: Policy) -> tuple[Book, Effects]:
    """LimitsChanged when the limits moved enough to matter to a trainer, or after some steps anyway."""
    if state.version <= book.limits_published_version:
        return book, ()
    at_start = book.num_steps <= policy.limits_every_step_until
    if not (at_start or book.limits_dirty or book.num_steps % policy.limits_look_every_steps == 0):
        return book, ()
    limits = rules.limits_of(state)
    values = (limits.norm, limits.energy, limits.gain, *map(limits.layers.get, state.layer_names))
    if all(value is None for value in values):
        return book, ()
    is_due = state.version - book.limits_published_version >= policy.limits_every_steps
    if not (at_start or book.limits_dirty or is_due or _moved(book.limits_published, values, policy.limits_change)):
        return book, ()
    message = LimitsChanged(run_id=book.run_id, attempt=book.attempt, ts=book.last_ts, step=step, limits=limits)
    book = book.model_copy(
        update={"limits_published_version": state.version, "limits_published": values, "limits_dirty": False}
    )
    return book, (Emit("limits", message),)


def _moved(old: tuple[float | None, ...], new: tuple[float | None, ...], fraction: float) -> bool:
    if len(old) != len(new):
        return True
    for before, after in zip(old, new, strict=True):
        if before is None or after is None:
            if before is not after:
                return True
        elif abs(after - before) > fraction * abs(before):
            return True
    return False
