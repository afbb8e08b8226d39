"""Which steps of an attempt have been seen: repeats are dropped, late ones accepted, gaps told.

Pure; looks at step numbers only. A gap is told after `gap_grace_steps` later steps or `gap_grace_s`
seconds of ticks, so that mere disorder is no gap; with subsampled logging the usual stride is none.
"""

from gradloc_detector.policy import GAPS_KEPT_MAX, STEP_JUMP_MAX, Policy
from gradloc_detector.state import Book, Effects, Emit, Gap
from gradloc_proto.messages import StepObserved, StreamGapNoticed

_STRIDE_KNOWN_STEPS = 4  # arrivals before the stride is believed


def absurdity(book: Book, step: int) -> str | None:
    """Why `step` cannot be a step of this attempt, or None."""
    if book.last_step is not None and step > book.last_step + STEP_JUMP_MAX:
        return f"step {step} is more than {STEP_JUMP_MAX} ahead of step {book.last_step}"
    return None


def is_new(book: Book, step: int) -> bool:
    """False for a step that was seen already, or is too old to tell."""
    if book.last_step is None or step > book.last_step:
        return True
    return any(gap.first <= step <= gap.last for gap in book.gaps)


def begun(book: Book, first_step: int | None) -> Book:
    """`book` once the trainer has said with which step the attempt begins: what lies between it and the first step that
    came is missing. Said again, it changes nothing."""
    if first_step is None or book.first_step is not None:
        return book
    gaps: list[Gap] = []
    for gap in book.gaps:
        gaps += _before(gap.last + 1, first_step) if gap.first == 0 and gap.told else (gap,)
    return book.model_copy(update={"first_step": first_step, "gaps": tuple(gaps)})


def _before(step: int, first_step: int | None) -> tuple[Gap, ...]:
    """What is missing before the first step that came. An attempt may start at any step (a checkpoint), and its very
    first messages may change places."""
    start = step if first_step is None else min(first_step, step)
    gaps = (Gap(first=0, last=start - 1, told=True), Gap(first=start, last=step - 1))
    return tuple(gap for gap in gaps if gap.first <= gap.last)


def arrived(book: Book, message: StepObserved, policy: Policy) -> tuple[Book, Effects]:
    """`book` after a new step: gaps opened or filled, and those whose grace is over told."""
    step, last = message.step, book.last_step
    gaps, distances = book.gaps, book.distances
    if last is None:
        gaps = _before(step, book.first_step)
    elif step < last:
        gaps = _without(gaps, step)
    else:
        distances = (*distances, step - last)[-policy.gap_grace_steps :]
        gaps = tuple(gap.model_copy(update={"later_steps": gap.later_steps + 1}) for gap in gaps)
        if step > last + 1:
            dropped = max(0, message.num_events_dropped - book.num_events_dropped)
            gaps = (*gaps, Gap(first=last + 1, last=step - 1, dropped=dropped))[-GAPS_KEPT_MAX:]
    book = book.model_copy(
        update={
            "last_step": step if last is None else max(last, step),
            "distances": distances,
            "num_steps": book.num_steps + 1,
            "gaps": gaps,
            "num_events_dropped": max(book.num_events_dropped, message.num_events_dropped),
        }
    )
    return told(book, policy) if gaps else (book, ())


def resumed(book: Book, message: StepObserved) -> tuple[Book, Effects]:
    """`book` at the first step after Redis had lost the state, or an attempt of which nothing was ever heard. Where the
    stream does not reach back to what was known, steps between are gone, and perhaps what was told of those before.
    """
    lost_at = book.lost_at
    if lost_at is None:
        return book, ()
    book = book.model_copy(update={"lost_at": None})
    if message.attempt == lost_at.attempt and message.step <= lost_at.step + 1:
        return book, ()
    last_step = max(lost_at.step, message.step - 1)
    if last_step < 0:
        return book, ()
    notice = StreamGapNoticed(
        run_id=book.run_id,
        attempt=lost_at.attempt,
        ts=message.ts,
        first_step=0,
        last_step=last_step,
        reason="never arrived: nothing was ever heard of this attempt"
        if lost_at.step < 0
        else f"Redis lost the streams; the last step known of them is {lost_at.step}",
    )
    return book, (Emit("incidents", notice),)


def ticked(book: Book, policy: Policy) -> tuple[Book, Effects]:
    """`book` after the clock moved: gaps that have waited long enough are told."""
    clock = book.clock
    if clock is None or all(gap.told for gap in book.gaps):
        return book, ()
    gaps = tuple(
        gap if gap.told or (gap.since is not None and gap.since <= clock) else gap.model_copy(update={"since": clock})
        for gap in book.gaps
    )
    return told(book.model_copy(update={"gaps": gaps}), policy)


def told(book: Book, policy: Policy, *, now: bool = False) -> tuple[Book, Effects]:
    """Tell the gaps whose grace is over, or all of them when the attempt is over (`now`)."""
    if book.num_steps < _STRIDE_KNOWN_STEPS and not now:
        return book, ()
    effects: list[Emit] = []
    gaps = []
    for gap in book.gaps:
        if not gap.told and (now or _is_due(gap, book, policy)):
            gap = gap.model_copy(update={"told": True})
            if gap.dropped or gap.last - gap.first + 2 > min(book.distances, default=1):
                effects.append(_notice(book, gap))
        gaps.append(gap)
    return book.model_copy(update={"gaps": tuple(gaps)}), tuple(effects)


def _is_due(gap: Gap, book: Book, policy: Policy) -> bool:
    if gap.later_steps >= policy.gap_grace_steps:
        return True
    return gap.since is not None and book.clock is not None and book.clock - gap.since >= policy.gap_grace_s


def _notice(book: Book, gap: Gap) -> Emit:
    if gap.dropped:
        reason = f"the trainer's queue dropped {gap.dropped} messages (bus slow or down)"
    else:
        reason = "never arrived: lost by Redis, or by the trainer before it could publish"
    return Emit(
        "incidents",
        StreamGapNoticed(
            run_id=book.run_id,
            attempt=book.attempt,
            ts=book.last_ts,
            first_step=gap.first,
            last_step=gap.last,
            reason=reason,
        ),
    )


def _without(gaps: tuple[Gap, ...], step: int) -> tuple[Gap, ...]:
    parts: list[Gap] = []
    for gap in gaps:
        if not gap.first <= step <= gap.last:
            parts.append(gap)
            continue
        if gap.first < step:
            parts.append(gap.model_copy(update={"last": step - 1}))
        if step < gap.last:
            parts.append(gap.model_copy(update={"first": step + 1}))
    return tuple(parts[-GAPS_KEPT_MAX:])
