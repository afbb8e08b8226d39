"""The `gradloc` command: a group that services and the demo add their subcommands to by entry point."""

import logging
from importlib import metadata

import click

from gradloc_proto import __version__

ENTRY_POINT_GROUP = "gradloc.commands"


class _Commands(click.Group):
    """Loads a subcommand only when it is asked for: `gradloc tail` must not import torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
            if point.name == cmd_name:
                return _loaded(point)
        return None


def _loaded(point: metadata.EntryPoint) -> click.Command:
    try:
        command = point.load()
    except ImportError as error:
        reason = f"`gradloc {point.name}` needs {error.name or error}; install gradloc[local]"
        return click.Command(point.name, help=f"({reason})", callback=lambda: _refuse(reason))
    assert isinstance(command, click.Command)
    return command


def _refuse(reason: str) -> None:
    raise click.UsageError(reason)


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gradloc")
def gradloc() -> None:
    """Finds the token that blew up an LLM's reinforcement-learning run, while the run goes on."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
