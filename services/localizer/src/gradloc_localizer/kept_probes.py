"""Answers to a localization's questions, kept in a store while it runs: who is killed and starts again asks none twice.

A name says what was asked, to the last bit, so drivers of one incident share answers and cannot mix them up. Whoever
may write there can make a finding wrong, and no more: tensors are read, nothing is executed. The other door to
safetensors.
"""

import logging

from safetensors import SafetensorError
from safetensors.torch import load, save

from gradloc.store import Store, StoreUnavailable
from gradloc.team import Answer

_log = logging.getLogger("gradloc.localizer")
ANSWER_BYTES_MAX = 4 << 30  # a larger one is asked again rather than kept
NUM_NAMES_MAX = 4096  # of one localization: hundreds are usual


class KeptProbes:
    """Under one step's prefix. A store that is away costs what it would have saved, and one line in the log."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names: set[str] = set()
        self._away = False

    def get(self, key: str) -> Answer | None:
        if self._away:
            return None
        try:
            data = self._store.read(_name(key), bytes_max=ANSWER_BYTES_MAX)
            tensors = load(data)
        except FileNotFoundError:
            return None
        except (StoreUnavailable, SafetensorError, ValueError) as error:
            self._lose(error)
            return None
        self._names.add(_name(key))
        exists = tensors.pop("exists", None)
        return Answer(tensors, exists=exists is None)

    def put(self, key: str, told: Answer) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in told.tensors.values())
        if self._away or size > ANSWER_BYTES_MAX or len(self._names) >= NUM_NAMES_MAX:
            return
        tensors = dict(told.tensors)
        if not told.exists:
            import torch

            tensors = {"exists": torch.zeros(1)}
        try:
            self._store.write(_name(key), save(tensors))
        except StoreUnavailable as error:
            self._lose(error)
            return
        self._names.add(_name(key))

    def _lose(self, error: Exception) -> None:
        if not isinstance(error, StoreUnavailable):
            _log.warning("a kept probe cannot be read; it is asked again")
            return
        self._away = True
        _log.warning("probes are not kept: %s", str(error)[:200])


def _name(key: str) -> str:
    return f"{key}.safetensors"
