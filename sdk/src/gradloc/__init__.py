"""gradloc finds the token that blew up an LLM's reinforcement-learning run, while the run goes on."""

from typing import TYPE_CHECKING, Any

from gradloc_proto import __version__

if TYPE_CHECKING:
    from gradloc.probe import Probe, watch

__all__ = ["Probe", "__version__", "watch"]


def __getattr__(name: str) -> Any:
    # Importing torch takes a second that `gradloc --help` should not wait for.
    if name in ("Probe", "watch"):
        from gradloc import probe

        return getattr(probe, name)
    raise AttributeError(f"module 'gradloc' has no attribute {name!r}")
