"""Options that several commands have, so that they read the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

ConfigOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", help="Settings file; default: $DRAFTLOOP_CONFIG, draftloop.toml."),
]
JsonOption: TypeAlias = Annotated[
    Path | None, typer.Option("--json", help="Write the numbers to this file.")
]
EmptyKafkaOption: TypeAlias = Annotated[
    str,
    typer.Option(
        help="host:port of a broker that holds nothing of Draftloop; what is made there is "
        "deleted again. Without it one is started here, if noida-db is installed."
    ),
]
