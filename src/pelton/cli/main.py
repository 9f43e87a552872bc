# SPDX-License-Identifier: Apache-2.0
"""The `pelton` command: composition root. Each command's module registers itself."""

import typer

import pelton
from pelton.cli import bench, chat, demo, eval, roofline, serve, worker, workers

_HELP = """Serve large language models, and measure what the hardware gives and why.

Examples:

  pelton serve smollm2                                  an OpenAI-compatible server

  pelton workers roll                                   replace its workers while it serves

  pelton worker --join tcp://10.0.0.1:7000 --worker-key FILE   a machine that runs workers of it

  pelton chat smollm2                                   the same engine in the terminal

  pelton bench smollm2 --scenario server --out report   the official LoadGen, a record, a report

  pelton eval smollm2 --task questions.jsonl            how right it is on your own data

  pelton roofline llama-3.1-8b --batch 256              what a card's limits allow, op by op
"""


def make_app() -> typer.Typer:
    app = typer.Typer(
        help=_HELP, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
    )
    app.callback()(_root)
    for module in (serve, worker, workers, chat, bench, demo, eval, roofline):
        module.register(app)
    return app


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"pelton {pelton.__version__}")
        raise typer.Exit()


def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", is_eager=True, callback=_print_version
    ),
) -> None:
    """Holds the options that come before a command."""


def main() -> None:
    make_app()()


if __name__ == "__main__":
    main()
