"""Checks of a row's token lists: ids, masks, labels, log-probabilities, sampled against trained ids.

Part of the data layer; text is checked in data_rows.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gradloc.checks.finding import CheckFinding, Tally, finding
from gradloc.checks.row_text import ids_of, numbers_of, text_of
from gradloc.checks.rows import Row
from gradloc.checks.vocabulary import Vocabulary

IGNORED_LABEL = -100


class ListChecker:
    """Looks at one row's lists after the other; `finish` says what only all rows together show."""

    def __init__(self, fields: Mapping[str, str], vocabulary: Vocabulary | None) -> None:
        self._fields = fields
        self._vocabulary = vocabulary
        self._pad = None if vocabulary is None else vocabulary.role_id("pad_token")
        self._eos = None if vocabulary is None else vocabulary.role_id("eos_token")
        self._num_ending = 0
        self._num_ending_unlabelled = 0
        self._first_unlabelled = 0

    def add(self, row: Row, tally: Tally) -> None:
        lists = {
            meaning: row.values[name]
            for meaning, name in self._fields.items()
            if meaning not in ("prompt", "response", "reward", "uid") and isinstance(row.values.get(name), list)
        }
        if not lists:
            return
        ids = ids_of(lists.get("ids"))
        response_ids = ids_of(lists.get("response_ids"))
        for meaning, found in (("ids", ids), ("response_ids", response_ids)):
            if found is not None:
                self._range(row, meaning, found, tally)
        self._lengths(row, lists, ids, response_ids, tally)
        for meaning in ("mask", "loss_mask"):
            if meaning in lists:
                self._mask(row, meaning, lists[meaning], tally)
        if "logp" in lists:
            self._logp(row, lists["logp"], tally)
        self._labels(row, lists, ids, response_ids, tally)
        if response_ids is not None:
            self._retokenized(row, ids, response_ids, tally)

    def _where(self, row: Row, meaning: str, token: int | None = None) -> dict[str, int | str]:
        where: dict[str, int | str] = {"row": row.number, "field": self._fields[meaning]}
        return where if token is None else where | {"token": token}

    def _range(self, row: Row, meaning: str, ids: Sequence[int], tally: Tally) -> None:
        bound = None if self._vocabulary is None else self._vocabulary.id_bound
        for at, one in enumerate(ids):
            if one < 0 or (bound is not None and one >= bound):
                what = f"id {one}" if bound is None else f"id {one}, ids end at {bound - 1}"
                tally.add(finding("data.id-out-of-range", what, self._where(row, meaning, at), id=one), meaning)
                return

    def _lengths(
        self,
        row: Row,
        lists: Mapping[str, Any],
        ids: Sequence[int] | None,
        response_ids: Sequence[int] | None,
        tally: Tally,
    ) -> None:
        """A mask over the row has the ids' length; what belongs to the response has the response's, or the ids'."""
        allowed = [len(one) for one in (ids, response_ids) if one is not None]
        if not allowed:
            return
        for meaning in ("mask", "loss_mask", "labels", "logp"):
            expected = allowed[:1] if meaning in ("mask", "labels") and ids is not None else allowed
            if meaning in lists and len(lists[meaning]) not in expected:
                what = f"{len(lists[meaning])} entries for {' or '.join(map(str, expected))} ids"
                where = self._where(row, meaning)
                tally.add(finding("data.mask-misaligned", what, where, length=len(lists[meaning])), meaning)

    def _mask(self, row: Row, meaning: str, values: Sequence[Any], tally: Tally) -> None:
        numbers = numbers_of(values)
        if numbers is None or any(one not in (0.0, 1.0) for one in numbers):
            at = 0 if numbers is None else next(i for i, one in enumerate(numbers) if one not in (0.0, 1.0))
            tally.add(finding("data.mask-values", "neither 0 nor 1", self._where(row, meaning, at)), meaning)
        elif not any(numbers):
            tally.add(finding("data.mask-empty", f"{len(numbers)} zeros", self._where(row, meaning)), meaning)

    def _logp(self, row: Row, values: Sequence[Any], tally: Tally) -> None:
        numbers = numbers_of(values)
        bad = None if numbers is None else next((i for i, one in enumerate(numbers) if not math.isfinite(one)), None)
        if numbers is None or bad is not None:
            value = math.nan if numbers is None or bad is None else numbers[bad]
            where = self._where(row, "logp", bad or 0)
            tally.add(finding("data.non-finite", f"log-probability is {value}", where, value=value))

    def _labels(
        self,
        row: Row,
        lists: Mapping[str, Any],
        ids: Sequence[int] | None,
        response_ids: Sequence[int] | None,
        tally: Tally,
    ) -> None:
        """Special tokens against what is trained on: padding must not be, the end of text should be."""
        labels = ids_of(lists.get("labels"))
        loss_mask = numbers_of(lists.get("loss_mask"))
        candidates = [one for one in (ids, response_ids) if one is not None]
        tokens: Sequence[int] | None
        if labels is not None:
            tokens, trained = ids, [one != IGNORED_LABEL for one in labels]
        elif loss_mask is not None:
            tokens = next((one for one in candidates if len(one) == len(loss_mask)), None)
            trained = [one == 1.0 for one in loss_mask]
        else:
            return
        if tokens is None or len(tokens) != len(trained):
            return
        meaning = "labels" if labels is not None else "loss_mask"
        if self._pad is not None and self._pad != self._eos:
            at = next((i for i, one in enumerate(tokens) if one == self._pad and trained[i]), None)
            if at is not None:
                tally.add(finding("data.label-on-special", "padding is trained on", self._where(row, meaning, at)))
        if self._eos is not None and self._eos in tokens and any(trained):
            ends = [i for i, one in enumerate(tokens) if one == self._eos]
            self._num_ending += 1
            if not any(trained[i] for i in ends):
                self._first_unlabelled = self._first_unlabelled if self._num_ending_unlabelled else row.number
                self._num_ending_unlabelled += 1

    def _retokenized(self, row: Row, ids: Sequence[int] | None, response_ids: Sequence[int], tally: Tally) -> None:
        """The row's text or trained ids against the sampled ids."""
        if self._vocabulary is None:
            return
        name = self._fields.get("response")
        text = None if name is None else text_of(row.values.get(name))
        sampled = self._stripped(response_ids)
        if text is None or not sampled or min(sampled) < 0 or max(sampled) >= self._vocabulary.id_bound:
            return
        again = self._stripped(self._vocabulary.encoded([text])[0])
        if again != sampled and _same_text(self._vocabulary, sampled, again):
            tally.add(retokenized(sampled, again, self._where(row, "response_ids")))

    def _stripped(self, ids: Sequence[int]) -> list[int]:
        special = self._vocabulary.special_ids if self._vocabulary is not None else frozenset()
        end = len(ids)
        while end and ids[end - 1] in special:
            end -= 1
        return list(ids[:end])

    def finish(self, tally: Tally) -> None:
        if self._num_ending >= 2 and self._num_ending == self._num_ending_unlabelled:
            what = f"the end of text is outside the loss in all {self._num_ending} rows that hold it"
            tally.add(finding("data.eos-unlabelled", what, {"row": self._first_unlabelled}, rows=self._num_ending))


def retokenized(
    sampled: Sequence[int], trained: Sequence[int], where: Mapping[str, int | str] | None = None
) -> CheckFinding:
    """The finding for two lists of ids of one text; names the first token that differs."""
    at = next((i for i, (a, b) in enumerate(zip(sampled, trained, strict=False)) if a != b), None)
    first = min(len(sampled), len(trained)) if at is None else at
    return finding(
        "data.retokenized",
        f"same text, other ids from token {first} on: importance ratios from there on are meaningless",
        {**(where or {}), "first_token": first},
        num_sampled=len(sampled),
        num_trained=len(trained),
    )


def _same_text(vocabulary: Vocabulary, sampled: Sequence[int], again: Sequence[int]) -> bool:
    first, second = vocabulary.decoded([sampled, again])
    return first.strip() == second.strip()
