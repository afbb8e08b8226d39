"""What the localizer's commands share: how they show progress and how they refuse."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

EXIT_REJECTED = 2


@contextlib.contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Callable[[str, float], None]]:
    """A bar on a terminal, nothing elsewhere."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _stage, _fraction: None
        return
    with Progress(TextColumn("{task.description:>12}"), BarColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda stage, fraction: bar.update(task, description=stage, completed=fraction)
