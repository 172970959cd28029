"""The command line: every command is registered here and written in `commands/`; `--json` prints exactly one object.

Errors that a user can act on end with one sentence on stderr (or `{"error": sentence}` on stdout) and exit code 2.
"""

import os
import sys
from typing import Annotated, Any

import typer

from outrider import __version__
from outrider.commands import checkpoints, measure, run, training
from outrider.console import console, show_error
from outrider.errors import OutriderError

UsageError: Any = typer.BadParameter.__mro__[1]  # typer does not export what it raises for a wrong command line

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Outrider serves Mixture-of-Experts models that do not fit in your GPU.",
    epilog="MODEL is a hub id, a local folder, or 'demo'. Memory is written 50%, 6GiB, or as slots per layer.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure; every result says where and how it was taken.")

for command in (
    run.demo,
    run.generate,
    run.chat,
    checkpoints.inspect,
    checkpoints.plan,
    checkpoints.synth,
    checkpoints.pack,
    training.train_draft,
    measure.cache_sim,
):
    app.command()(command)
app.add_typer(bench, name="bench")
bench.command("round")(measure.dflash_round)
for measurement in (
    measure.residency,
    measure.kernels,
    measure.step,
    measure.timeline,
    measure.prefill,
    measure.tables,
):
    bench.command()(measurement)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Outrider serves Mixture-of-Experts models that do not fit in your GPU."""


def main() -> None:
    """Entry point of the `outrider` command."""
    as_json = "--json" in sys.argv
    try:
        code = app(standalone_mode=False)
    except OutriderError as error:
        show_error(str(error), as_json)
        sys.exit(2)
    except UsageError as error:
        if message := error.format_message():  # a bare `outrider` has shown its help already
            show_error(f"{message.rstrip('.')}; see --help", as_json)
        sys.exit(2)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered cannot be written either
        show_error(f"the output cannot be written: {error.strerror}", as_json=False)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code or 0)
