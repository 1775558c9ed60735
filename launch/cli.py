"""The commands ``spectrain-launch`` and ``spectrain``: options in, exit code out.

Imports nothing heavy: ``--help`` must answer at once. What an option means is decided in
``options.py`` and ``protocol/settings.py``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..protocol.methods import METHODS, PREDICTORS

__all__ = ["launch", "main"]

_CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "auto_envvar_prefix": "SPECTRAIN_LAUNCH",
    "show_default": True,
    "max_content_width": 100,
}


def _dashed(name: str) -> str:
    """Accept underscores where we write dashes, as other launchers do."""
    return name.replace("_", "-")


def _size_bytes(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Read a size such as 512MiB, 2GB or 1000000."""
    from .options import parse_size

    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(
    "launch",
    context_settings={**_CONTEXT, "token_normalize_func": _dashed},
    epilog="Example:  spectrain-launch --nodes hosts.txt --stages 8 train.py --set lr=0.01",
)
@click.argument("job", required=False)
@click.option("--nodes", metavar="FILE", help="Host file, or 'slurm' inside an allocation.")
@click.option("-H", "--hosts", metavar="LIST", help="Hosts, such as node1:4,node2:4.")
@click.option("--stages", type=int, help="Parts to cut the model into, one worker each.")
@click.option("--method", metavar="NAME", help=f"Staleness method: {', '.join(METHODS)}.")
@click.option("--microbatches", type=int, help="Micro-batches per mini-batch, of some methods.")
@click.option("--predictor", type=click.Choice(list(PREDICTORS)), help="How to look ahead.")
@click.option("--horizon", type=click.Choice(["paper", "exact"]),
              help="Backwards last as long as forwards, or twice as long.")  # fmt: skip
@click.option("--predict-lr", type=click.Choice(["current", "scheduled"]),
              help="Look ahead by the coming learning rate, or by the schedule.")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="What stages compute on.")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), help="Type of live weights.")
@click.option("--batch-size", type=int, help="Samples per mini-batch.")
@click.option("--epochs", type=int, help="Passes over the training set.")
@click.option("--max-batches", type=int, help="Stop after so many mini-batches.")
@click.option("--seed", type=int, help="Weights, order of samples, random draws.")
@click.option("--partition", metavar="HOW", help="auto, equal, or layer counts such as 8,10,10.")
@click.option("--threads", type=int, help="Intra-op threads of a worker on CPU.")
@click.option("--evaluate/--no-evaluate", default=None, help="Test at the end of each epoch.")
@click.option("--set", "assignments", metavar="NAME=VALUE", multiple=True,
              help="A parameter of the job's functions; repeat as needed.")  # fmt: skip
@click.option("--run-dir", metavar="DIR", help="Where results go.  [default: runs/<time>]")
@click.option("--resume", "resume", type=click.Path(path_type=Path), metavar="RUN_DIR",
              help="Continue a run from its newest checkpoint; its settings hold.")  # fmt: skip
@click.option("-q", "--quiet", is_flag=True, help="Only warnings and errors.")
@click.option("--json", "json_lines", is_flag=True, help="One JSON object per event on stdout.")
@click.option("--dry-run", is_flag=True, help="Check hosts, print the plan, start nothing.")
@click.option("--python", metavar="PATH", help="Interpreter on the hosts.  [default: this one]")
@click.option("-x", "exports", metavar="NAME[=VALUE]", multiple=True,
              help="Pass or set an environment variable.")  # fmt: skip
@click.option("--env-file", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="NAME=value lines to pass.")  # fmt: skip
@click.option("--bind", metavar="ADDR[:PORT]", help="Address other hosts reach this one by.")
@click.option("--ssh-port", type=int, help="Port of sshd on the hosts.")
@click.option("--ssh-identity", metavar="FILE", help="Private key for ssh.")
@click.option("--ssh-option", "ssh_options", metavar="NAME=VALUE", multiple=True,
              help="As after ssh -o; repeat as needed.")  # fmt: skip
@click.option("--max-restarts", type=int, help="Restarts of one stage; 0: the first death ends.")
@click.option("--snapshot-every", type=int, metavar="UPDATES",
              help="Between snapshot rounds; 0: none.  [default: from measured costs]")  # fmt: skip
@click.option("--log-memory", "log_memory_bytes", metavar="SIZE", callback=_size_bytes,
              help="For what a worker has sent, such as 512MiB.")  # fmt: skip
@click.option("--start-timeout", "start_timeout_s", type=float, help="Seconds for start-up.")
@click.option("--wait-timeout", "wait_timeout_s", type=float,
              help="Seconds a stage may wait for a neighbour.")  # fmt: skip
@click.option("--lease", "lease_s", type=float, help="Seconds a silent process is believed in.")
@click.option("--grace", "grace_s", type=float, help="Seconds between asking to end and killing.")
@click.version_option(__version__, prog_name="spectrain")
def launch(**options: Any) -> None:
    """Train JOB as an asynchronous pipeline over many GPUs.

    JOB is a Python file or module that defines model(), datasets(), loss() and optimizer(); without
    it, job.py in the current directory, else the digits example that comes with the package.
    Without hosts, the stages run on this machine. Options left out take the job's own `settings`,
    then their defaults. Each option can also be set as SPECTRAIN_LAUNCH_<OPTION>.
    """
    from .run import run

    sys.exit(_guarded(run, options))


for _option in launch.params:
    if isinstance(_option, click.Option):
        # Named after what the user types, not after the setting it becomes.
        _name = max(_option.opts, key=len).strip("-").replace("-", "_").upper()
        _option.envvar = f"SPECTRAIN_LAUNCH_{_name}"


@click.group(context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="spectrain")
def main() -> None:
    """SpecTrain: asynchronous pipeline training that predicts the weights."""


main.add_command(launch)


@main.command(context_settings=_CONTEXT)
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(run_dir: Path, as_json: bool) -> None:  # noqa: FBT001  click passes flags by name
    """Show how the run in RUN_DIR is, or how it ended."""
    sys.exit(_guarded(_show_status, {"run_dir": run_dir, "as_json": as_json}))


def _show_status(run_dir: Path, as_json: bool) -> int:  # noqa: FBT001
    from .status import read_status, render_status

    found = read_status(run_dir)
    click.echo(json.dumps(found) if as_json else render_status(found))
    return 0


_SIMULATED = (
    "job", "stages", "method", "microbatches", "predictor", "horizon", "predict_lr", "precision",
    "batch_size", "epochs", "max_batches", "seed", "partition", "threads", "evaluate",
    "assignments",
)  # fmt: skip
"""Parameters of ``launch`` that mean something to one process."""


@main.command(
    context_settings=_CONTEXT, params=[each for each in launch.params if each.name in _SIMULATED]
)
def simulate(**options: Any) -> None:
    """Train JOB with all its stages in one process, to study depth without machines.

    The bits are those of a run with a process for each stage. Prints one JSON object for each
    mini-batch and evaluation, then a summary.
    """
    from .simulate import simulate as run_simulation

    sys.exit(_guarded(run_simulation, options))


def _guarded(command: Any, options: dict[str, Any]) -> int:
    """Run a command; a user's mistake is one message, a fault of ours a traceback."""
    from ..protocol.errors import ExitCode, SpectrainError

    try:
        return command(**options)
    except SpectrainError as error:
        click.echo(f"spectrain: {error}", err=True)
        return error.exit_code
    except KeyboardInterrupt:
        click.echo("spectrain: stopped before anything was started", err=True)
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
