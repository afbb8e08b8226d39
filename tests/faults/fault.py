"""What a fault is: it does harm, and says after how many seconds it is healed and how. All randomness comes from the
schedule's dice."""

import random
from collections.abc import Callable
from typing import Any

Heal = Callable[[], Any]
Fault = Callable[[Any, random.Random], tuple[float, Heal]]


class Unavailable(Exception):
    """This machine does not allow the fault; the text says why."""


class NoTarget(Exception):
    """Nothing is there yet that the fault could strike."""


def nothing() -> None:
    return
