"""Quarantine: samples that a data loader leaves out, with who put them there and why.

    quarantine = Quarantine("quarantine.jsonl")
    quarantine.add_finding(finding, run_id="my-run", by="alice")
    rows = quarantine.keep(dataset, uid_of=lambda row: row["uid"])

Off unless a loader asks it; nothing is quarantined by itself. The file is the audit: it only grows, and
a release is one more line. One process writes, all may read. Knows samples by the uid that the trainer
gave to `probe.tokens`.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from gradloc import audit
from gradloc_proto.messages import Finding

UIDS_MAX = 100_000  # more is a data set to fix, not a list to keep
UID_LENGTH_MAX = 512
# Verdicts that blame what is in a sample; the others blame the code, the hardware or nobody.
SAMPLE_VERDICTS = ("token", "sequence", "layer", "non-finite")
_T = TypeVar("_T")


@dataclass(frozen=True)
class QuarantineEntry:
    action: Literal["quarantined", "released"]
    uid: str
    reason: str
    by: str
    ts: float
    run_id: str = ""
    step: int | None = None
    verdict: str = ""


class Quarantine:
    """The list in one file. `num_rejected`: lines of the file that could not be read."""

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self.num_rejected = 0
        self._clock = clock
        self._entries: list[QuarantineEntry] = []
        self._uids: set[str] = set()
        self.reload()

    def __contains__(self, uid: object) -> bool:
        return str(uid) in self._uids

    def __len__(self) -> int:
        return len(self._uids)

    @property
    def uids(self) -> frozenset[str]:
        return frozenset(self._uids)

    @property
    def history(self) -> tuple[QuarantineEntry, ...]:
        """Everything that was ever decided, oldest first."""
        return tuple(self._entries)

    def reload(self) -> None:
        """Read the file again. Ranks that share it do this at the same step, so that their loaders agree."""
        records, num_rejected = audit.read(self.path)
        self._entries, self._uids = [], set()
        for record in records:
            entry = _entry_of(record)
            if entry is None:
                num_rejected += 1
            else:
                self._apply(entry)
        self.num_rejected = num_rejected

    def add(
        self, uid: object, *, reason: str, by: str, run_id: str = "", step: int | None = None, verdict: str = ""
    ) -> None:
        """Quarantine a sample; again is fine. Raises ValueError for an unusable uid or a list that is full."""
        text = _checked(uid)
        if text not in self._uids and len(self._uids) >= UIDS_MAX:
            raise ValueError(f"{self.path} holds {UIDS_MAX} samples already; fix the data set instead")
        self._write(QuarantineEntry("quarantined", text, _said(reason), by, self._clock(), run_id, step, verdict))

    def add_finding(self, finding: Finding, *, run_id: str, by: str) -> tuple[str, ...]:
        """Quarantine the samples of a proved finding's culprits; their uids.

        Raises ValueError, saying why, when the finding blames no sample, is not proved (the step was not
        reproduced, or stays above its limit without the culprits) or names no uid.
        """
        if finding.verdict not in SAMPLE_VERDICTS:
            raise ValueError(
                f"the verdict is {finding.verdict!r}, which is no sample's fault; "
                f"expected one of {', '.join(SAMPLE_VERDICTS)}"
            )
        if not finding.fidelity.reproduced or finding.certificate is None or not finding.certificate.holds:
            raise ValueError("the finding is not proved: without its culprits the step is not known to be healthy")
        uids = tuple(dict.fromkeys(one.uid for one in finding.culprits if one.uid))
        if not uids:
            raise ValueError("the culprits have no uid; expected the trainer to give uid= to probe.tokens()")
        for uid in uids:
            self.add(uid, reason=finding.summary, by=by, run_id=run_id, step=finding.step, verdict=str(finding.verdict))
        return uids

    def release(self, uid: object, *, reason: str, by: str) -> None:
        """Take a sample back. Raises ValueError when it is not in quarantine."""
        text = _checked(uid)
        if text not in self._uids:
            raise ValueError(f"sample {text[:80]!r} is not in quarantine")
        self._write(QuarantineEntry("released", text, _said(reason), by, self._clock()))

    def keep(self, rows: Iterable[_T], uid_of: Callable[[_T], object]) -> Iterator[_T]:
        """The rows that are not in quarantine, in their order."""
        return (row for row in rows if str(uid_of(row)) not in self._uids)

    def _write(self, entry: QuarantineEntry) -> None:
        audit.append(self.path, {name: value for name, value in asdict(entry).items() if value not in ("", None)})
        self._apply(entry)

    def _apply(self, entry: QuarantineEntry) -> None:
        self._entries.append(entry)
        if entry.action == "quarantined":
            self._uids.add(entry.uid)
        else:
            self._uids.discard(entry.uid)


def _checked(uid: object) -> str:
    text = str(uid)
    if not text or len(text) > UID_LENGTH_MAX:
        raise ValueError(f"uid has {len(text)} characters; expected 1 to {UID_LENGTH_MAX}")
    return text


def _said(reason: str) -> str:
    if not reason.strip():
        raise ValueError("no reason is given; expected one that the next reader understands")
    return reason[:1_000]


def _entry_of(record: dict[str, Any]) -> QuarantineEntry | None:
    """The entry of a line, None where it is not one: files are edited by hand."""
    step = record.get("step")
    texts = {name: record.get(name, "") for name in ("uid", "reason", "by", "run_id", "verdict")}
    ts = record.get("ts")
    well_typed = (
        record.get("action") in ("quarantined", "released")
        and all(isinstance(text, str) for text in texts.values())
        and 0 < len(texts["uid"]) <= UID_LENGTH_MAX
        and isinstance(ts, int | float)
        and (step is None or isinstance(step, int))
    )
    if not well_typed:
        return None
    return QuarantineEntry(action=record["action"], ts=float(record["ts"]), step=step, **texts)
