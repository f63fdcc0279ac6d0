"""`carpool recipes`: list and show. Plug-ins add commands to it, as carpool_systems does (`carpool.plugins`)."""

from __future__ import annotations

from typing import Annotated

import typer

from carpool.cli.common import Debug, errors

recipes = typer.Typer(help="Published systems, as choices of what Carpool has.", no_args_is_help=True)


@recipes.command("list")
def list_recipes(debug: Debug = False) -> None:
    """The recipes, what they are, and what of them this version lacks."""
    with errors(debug):
        from carpool.recipes import names, read

        for name in names():
            one = read(name)
            typer.echo(f"{name:<20} {one.system} ({one.source})")
            typer.echo(f"{'':<20} {one.kind}: {', '.join(one.mechanisms)}")
            typer.echo(f"{'':<20} {one.note}")
            if one.missing:
                typer.echo(f"{'':<20} REFUSED: this version lacks {', '.join(one.missing)}")


@recipes.command("show")
def show_recipe(
    name: Annotated[str, typer.Argument(help="As `carpool recipes list` names it.")], debug: Debug = False
) -> None:
    """A recipe's file, which `carpool train --config` takes."""
    with errors(debug):
        from carpool.recipes import read

        one = read(name)
        one.check_complete()
        typer.echo(one.path.read_text(), nl=False)
