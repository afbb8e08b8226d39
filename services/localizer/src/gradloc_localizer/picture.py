"""A page as a picture, by the Chromium of this machine. Knows nothing of what the page shows."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, HEIGHT = 1120, 1800  # of a report's first screens; the whole of 16,384 tokens would be forty
TIMEOUT_S = 240.0


class NoPicture(ValueError):
    """No browser, or none that works; the text is one line for the user."""


def browser() -> str:
    """Path of a Chromium. Raises NoPicture."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise NoPicture("a PNG needs Chromium on the PATH and there is none; install it, or write --html alone")
    return found


def take(page: Path, out: Path) -> None:
    """Write the top of `page` to `out`. Raises NoPicture or OSError."""
    with tempfile.TemporaryDirectory(prefix="gradloc-picture-") as folder:
        picture = Path(folder) / "page.png"
        command = [browser(), "--headless", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
        command += [f"--user-data-dir={folder}/profile", f"--screenshot={picture}"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:  # Chromium's sandbox refuses root
            command.append("--no-sandbox")
        try:
            done = subprocess.run(
                [*command, page.resolve().as_uri()], capture_output=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise NoPicture(f"Chromium took more than {TIMEOUT_S:.0f} s over the page; write --html alone") from None
        if not picture.exists():
            raise NoPicture(f"Chromium made no picture (exit code {done.returncode}); write --html alone")
        out.write_bytes(picture.read_bytes())
