"""Laid on PYTHONPATH by soak.py: the process says every few seconds what of its memory is in use.

What the system counts includes what allocators keep for later, in pieces; a leak shows in what is in use. Two numbers
go into $SOAK_ALIVE/PID: blocks that Python's objects take, and bytes of the C library's heap. They are counted after a
full collection: CPython keeps up to 2,000 freed tuples of each of twenty sizes for later, and counts them as used.
"""

import ctypes
import gc
import os
import sys
import threading
import time
from pathlib import Path

LOOK_EVERY_S = 10.0


class Heap(ctypes.Structure):
    """struct mallinfo2: ten numbers."""

    _fields_ = [(name, ctypes.c_size_t) for name in (*"abcd", "mapped", *"ef", "in_use", *"gh")]


def tell(place: Path) -> None:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Heap
    part = place.with_suffix(".part")
    while True:
        gc.collect()
        heap = mallinfo()
        part.write_text(f"{sys.getallocatedblocks()} {heap.in_use + heap.mapped}")
        part.replace(place)
        time.sleep(LOOK_EVERY_S)


if "SOAK_ALIVE" in os.environ and hasattr(ctypes.CDLL(None), "mallinfo2"):
    place = Path(os.environ["SOAK_ALIVE"]) / str(os.getpid())
    threading.Thread(target=tell, args=(place,), daemon=True).start()
