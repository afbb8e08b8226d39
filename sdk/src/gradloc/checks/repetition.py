"""Prompts seen before, in memory of a fixed size: 64-bit fingerprints in an open table.

The chance that a million prompts hold one false repetition is 3e-8. Knows no rows.
"""

from array import array

SLOTS = 1 << 21  # 48 MiB in all, taken at once: memory does not grow with the rows
TRACKED_MAX = SLOTS * 3 // 4  # fuller tables become slow


class Seen:
    """Remembers which group each of the first TRACKED_MAX distinct prompts belonged to, and its first row."""

    def __init__(self, slots: int = SLOTS) -> None:
        self._mask = slots - 1
        assert slots & self._mask == 0, "a power of two"
        self._prints = array("Q", bytes(8 * slots))
        self._groups = array("Q", bytes(8 * slots))
        self._rows = array("Q", bytes(8 * slots))
        self._tracked_max = slots * 3 // 4
        self.num_tracked = 0

    @property
    def is_full(self) -> bool:
        """From here on new prompts are not remembered."""
        return self.num_tracked >= self._tracked_max

    def first_row(self, prompt: str, group: int, row: int) -> int | None:
        """First row of the same prompt under another group, else None. Remembers the prompt."""
        # Slot 0 of a table means empty, so no fingerprint may be 0.
        fingerprint = (hash(prompt) & 0xFFFF_FFFF_FFFF_FFFF) or 1
        group &= 0xFFFF_FFFF_FFFF_FFFF
        at = fingerprint & self._mask
        while True:
            known = self._prints[at]
            if known == fingerprint:
                return None if self._groups[at] == group else self._rows[at]
            if known == 0:
                if not self.is_full:
                    self._prints[at], self._groups[at], self._rows[at] = fingerprint, group, row
                    self.num_tracked += 1
                return None
            at = (at + 1) & self._mask
