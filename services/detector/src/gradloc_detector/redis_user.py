"""`gradloc redis-user`: a password and the line that gives it a role's rights. Speaks to no Redis."""

import json
import re
import secrets
import sys
from hashlib import sha256

import click

from gradloc_proto.rights import ROLES, Role, rules

BAD_INPUT = 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@click.command("redis-user")
@click.option("--role", type=click.Choice(ROLES), default="trainer", show_default=True)
@click.option("--runs", default="*", show_default=True, help="Of a trainer: a run id, or a beginning and a *.")
@click.option("--name", help="The user's name; the role's if not given.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead.")
def redis_user(role: Role, runs: str, name: str | None, as_json: bool) -> None:
    """Make a Redis user of a role: its password, and the line for an ACL file or ACL SETUSER.

    The password is shown once and kept nowhere; the line holds its SHA-256 only. Needs Redis 7.0.
    """
    name = role if name is None else name
    try:
        if not _NAME.fullmatch(name):
            raise ValueError(f"--name {name[:40]!r}: expected 1 to 64 letters, digits, '.', '_' or '-'")
        if runs != "*" and role != "trainer":
            raise ValueError(f"--runs is for the role trainer; a {role} serves all runs")
        granted = rules(role, runs=runs)
    except ValueError as error:
        click.echo(f"gradloc redis-user: {error}", err=True)
        sys.exit(BAD_INPUT)
    password = secrets.token_urlsafe(32)
    line = f"user {name} on #{sha256(password.encode()).hexdigest()} {' '.join(granted)}"
    if as_json:
        click.echo(json.dumps({"name": name, "password": password, "line": line}))
        return
    click.echo(f"The password of {name}, for redis://{name}:PASSWORD@host:6379/0; it is shown only now:\n", err=True)
    click.echo(password)
    click.echo("\nAdd this line to Redis' ACL file, or say it after ACL SETUSER without its first word:\n", err=True)
    click.echo(line, err=True)
