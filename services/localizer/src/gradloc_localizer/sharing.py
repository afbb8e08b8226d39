"""Who answers a localization's questions: kept answers first, then replicas as they are free, then this process.

A replica that dies costs the shard it had; another one takes it. Replicas that do not come are not waited for. Knows
no Ray: `replicas` bring it.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from gradloc.policy import PlacedBatch, Policy
from gradloc.replay import Gradient
from gradloc.team import Answer, Question, Team, answer, fits
from gradloc_localizer.kept_probes import KeptProbes

_log = logging.getLogger("gradloc.localizer")


class Replicas(Protocol):
    """Elsewhere. `offer`: whether one of them took the question; `collect`: what is done by (number, answer), None
    for an answer where its replica died; with `wait`, not before there is one."""

    def offer(self, number: int, question: Question, gradient: Gradient | None) -> bool: ...

    def collect(self, *, wait: bool) -> list[tuple[int, Answer | None]]: ...


class Alone:
    """No replica but this process."""

    def offer(self, number: int, question: Question, gradient: Gradient | None) -> bool:
        return False

    def collect(self, *, wait: bool) -> list[tuple[int, Answer | None]]:
        return []


class Sharing:
    """`ask` of a team. num_kept, num_asked: answers that were found and that had to be computed."""

    def __init__(
        self,
        policy: Policy,
        batches: Sequence[PlacedBatch],
        step: str,
        kept: KeptProbes | None,
        replicas: Replicas,
    ) -> None:
        self._own = copy.copy(policy)  # over the same model, but without the team: this one computes
        self._batches = batches
        self._step = step
        self._kept = kept
        self._replicas = replicas
        self.num_kept = self.num_asked = 0

    def ask(self, questions: Sequence[Question], gradient: Gradient | None) -> list[Answer]:
        told: dict[int, Answer] = {}
        keys = [question.key(self._step) for question in questions]
        for number, (question, key) in enumerate(zip(questions, keys, strict=True)):
            known = None if self._kept is None else self._kept.get(key)
            if known is not None and fits(self._own, question, known):
                told[number] = known
        split = self._own.split
        if split is not None and self._kept is not None:  # each process keeps its part, and all compute or nobody
            have = split.all_have([number in told for number in range(len(questions))])
            told = {number: known for number, known in told.items() if have[number]}
        self.num_kept += len(told)
        self.num_asked += len(questions) - len(told)
        left = deque(number for number in range(len(questions)) if number not in told)
        running: set[int] = set()

        def take(number: int, done: Answer) -> None:
            told[number] = done
            if self._kept is not None:
                self._kept.put(keys[number], done)

        while left or running:
            while left and self._replicas.offer(left[0], questions[left[0]], gradient):
                running.add(left.popleft())
            if left:
                number = left.popleft()
                take(number, answer(self._own, self._batches, questions[number], gradient))
            for number, done in self._replicas.collect(wait=not left and bool(running)):
                running.discard(number)
                if done is None:
                    left.append(number)
                else:
                    take(number, done)
        return [told[number] for number in range(len(questions))]


def shared(
    policy: Policy,
    batches: Sequence[PlacedBatch],
    step: str,
    kept: KeptProbes | None,
    replicas: Replicas | None = None,
    on_sharing: Callable[[Sharing], None] = lambda _sharing: None,
) -> None:
    """Gives the policy a team."""
    sharing = Sharing(policy, batches, step, kept, replicas or Alone())
    on_sharing(sharing)
    policy.team = Team(policy, batches, sharing.ask)
