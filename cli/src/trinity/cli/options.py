"""Options and arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="The run's YAML; or give it as the first argument")
]
RunOption = Annotated[Path | None, typer.Option("--config", "-c", help="The run's YAML")]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[YAML] [KEY.PATH=VALUE]...", help="Values over the YAML's")
]
PluginDirs = Annotated[
    list[Path] | None,
    typer.Option("--plugin-dir", help="Folder with reward functions and workflows; may be given several times"),
]
JobOption = Annotated[Path | None, typer.Option("--job", help="Job folder of the run")]
StageOption = Annotated[
    str, typer.Option("--stage", help="Stage of the job; else the live one, or the last that was trained")
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON")]
Version = Annotated[int, typer.Argument(min=0, help="Its number")]
Ordinals = Annotated[list[int] | None, typer.Argument(metavar="[ORDINAL]...", help="Tasks, by their ordinals")]
All = Annotated[bool, typer.Option("--all", help="All that have a letter")]
