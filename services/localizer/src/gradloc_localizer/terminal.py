"""What the localizer's commands share: how they show progress, refuse and write numbers."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from gradloc_proto.codec import plain_number

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


def finite(value: object) -> object:
    """Strict JSON: numbers that are not finite as the strings that messages use."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return plain_number(value) if isinstance(value, float) else value
