"""`fsdp2 verify TARGET`: the verdict."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from ...verifier.errors import UserError
from ..progress import Live
from ..reports import HELP, wanted_reports, write_verdict

TIERS = ("static", "simulate", "ranks")
EPILOG = """\
The script is run, unmodified, in several roles: train (N ranks), reference (real DDP stands in for fully_shard), envelope (the
reference from weights one unit in the last place away: its noise sets the tolerance), single (one process, the whole global batch), resume
(same number of ranks) and reshard (others). The verifier stops each run after K optimizer steps. `{checkpoint}` in the arguments is one
fresh folder that the train and resumed runs share.

examples:
  fsdp2 verify my-run                                       a scaffold: how to run it stands in its verify.yaml
  fsdp2 verify train.py --nproc 4 -- --config small.yaml    a script, with arguments of its own
  fsdp2 verify train.py --save-args "--save-every 3 --out {checkpoint}" --resume-args "--resume {checkpoint}"
  fsdp2 verify train.py --reference "old/train_ddp.py --small" -- --small
  fsdp2 verify -m pkg.train --nproc 4 -- --small            a module of a package in the current folder
  fsdp2 verify train.py --only gradients --skip token-mean-of-means
  fsdp2 verify my-run --report json=report.json --report text
  fsdp2 verify my-run --report github --report junit=verify.xml --report sarif=verify.sarif
  fsdp2 verify my-run --baseline report.json                exit 1 only on failures that this report does not have

exit codes: 0 pass, 1 a rule failed, 2 bad usage, 4 something could not be checked (it says what).
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "verify",
        help="run a training script on N ranks and prove it right",
        usage="fsdp2 verify [TARGET | -m MODULE] [options] [-- SCRIPT ARGS]",
        description="Run a training script, generated or your own, and check sharding, mathematics and checkpoints.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", metavar="TARGET", type=Path, nargs="?", help="a script, or a folder with verify.yaml or train.py"
    )
    parser.add_argument(
        "-m", "--module", metavar="MODULE", help="run a module as `python -m` does, from the current folder (or TARGET)"
    )
    parser.add_argument("--nproc", metavar="N", help="ranks (default 2)")
    parser.add_argument("--steps", metavar="K", help="optimizer steps to compare (default 5)")
    parser.add_argument(
        "--reshard-to", metavar="N,M", help="other world sizes to resume on (default 1 and twice --nproc)"
    )
    parser.add_argument("--save-args", metavar="ARGS", help="how the script is told to save, after step 1 to K-1")
    parser.add_argument("--resume-args", metavar="ARGS", help="how the script is told to resume")
    parser.add_argument(
        "--single-args", metavar="ARGS", help="how one process is told to take the whole global batch at once"
    )
    parser.add_argument("--reshard-args", metavar="ARGS", help="further arguments of the runs on other world sizes")
    parser.add_argument(
        "--reference",
        metavar="'SCRIPT ARGS'",
        help="the script that this one was converted from, as one more oracle: run as it is, on one rank if it knows of no others",
    )
    parser.add_argument(
        "--thorough", action="store_true", default=None, help="kill at every moment of a save, not at one (slower)"
    )
    parser.add_argument("--timeout", metavar="S", help="seconds for each launch (default 300)")
    parser.add_argument(
        "--device", metavar="WHERE", help="auto (GPUs if there is one for each rank, else CPU), cpu, cuda"
    )
    parser.add_argument(
        "--oversubscribe",
        action="store_const",
        const=True,
        help="with --device cuda: let several ranks share a GPU where there are too few",
    )
    parser.add_argument(
        "--launcher",
        metavar="HOW",
        help="fork (default): warm ranks, forked from a process that has torch; torchrun: the real one, slower",
    )
    parser.add_argument(
        "--tier",
        choices=TIERS,
        default="ranks",
        help="ranks (default); simulate: one process with a fake process group of --nproc ranks, no sockets, structure only; "
        "static: the sources alone",
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="a verify.yaml with the same keys as these options")
    parser.add_argument(
        "--only", metavar="RULE", action="append", default=[], help="judge this rule or family only (repeatable)"
    )
    parser.add_argument(
        "--skip", metavar="RULE", action="append", default=[], help="leave out this rule or family (repeatable)"
    )
    parser.add_argument(
        "--report",
        metavar="FORMAT[=PATH]",
        action="append",
        default=[],
        help=HELP,
    )
    parser.add_argument("--json", action="store_true", help="the same as --report json")
    parser.add_argument(
        "--baseline",
        metavar="OLD.json",
        type=Path,
        help="an earlier JSON report of this target: exit 1 only on failures that it does not have",
    )
    parser.add_argument(
        "--work", metavar="DIR", type=Path, help="keep traces and outputs of the runs in this new folder"
    )
    parser.set_defaults(run=run, script_args=None)


def run(options: argparse.Namespace) -> int:
    """Verify, write the reports, return the verdict's exit code."""
    from ...verifier import baseline
    from ...verifier.flow import select, verify
    from ...verifier.report import RENDERERS
    from ...verifier.target import resolve

    names = (
        "module",
        "nproc",
        "steps",
        "reshard_to",
        "save_args",
        "resume_args",
        "single_args",
        "reshard_args",
        "reference",
        "thorough",
        "timeout",
        "device",
        "launcher",
        "oversubscribe",
    )
    flags = {name: getattr(options, name) for name in names}
    if options.target is None and options.module is None:
        raise UserError("nothing to verify: give a script, a folder, or -m MODULE")
    target = resolve(options.target, {**flags, "args": options.script_args}, options.config)
    select(options.only, options.skip, options.tier)
    if options.work is not None and options.work.exists():
        raise UserError(f"{options.work}: exists already; --work needs a new folder")
    old = None
    if options.baseline is not None:
        old = baseline.load(options.baseline)
        baseline.must_be_of(options.baseline, old, target.describe())
    reports = wanted_reports(options.report, options.json, RENDERERS)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all is cleared away
    work = options.work or Path(tempfile.mkdtemp(prefix="fsdp2-verify-"))
    try:
        with Live(sys.stderr) as live:
            verdict = verify(
                target, work.resolve(), options.only, options.skip, sys.executable, progress=live, tier=options.tier
            )
        if old is not None:
            verdict = baseline.held_against(verdict, options.baseline, old)
        write_verdict(reports, verdict, RENDERERS)
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    return verdict.exit_code
