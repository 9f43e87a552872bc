# SPDX-License-Identifier: Apache-2.0
"""Registers nothing yet: replaced as its command lands."""

import typer


def register(app: typer.Typer) -> None:
    """Adds no command."""
