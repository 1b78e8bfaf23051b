"""`fsdp2 verify TARGET`: runs a script in several roles and gives a verdict."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...verifier.config.flags import FLAGS
from ...verifier.errors import FAIL, INCONCLUSIVE, OUR_FAULT, PASS, UserError
from ...verifier.isolation.leftovers import remove, temporary
from ..atomic_write import defer_signals
from ..output import add_command, log
from ..progress import Live
from ..reports import (
    HELP,
    PLACE,
    Report,
    add_options,
    for_target,
    parsed_reports,
    reports_by_target,
    write_verdict,
)

if TYPE_CHECKING:
    from ...verifier.config.policy import Checkouts
    from ...verifier.config.target import Target
    from ...verifier.verdict import Verdict

Known = tuple[Path, dict[str, Any], "Checkouts | None"]  # an earlier report
TIERS = ("static", "simulate", "ranks")
WORST = (FAIL, OUR_FAULT, INCONCLUSIVE, PASS)  # of several targets, the first of these decides
EPILOG = """\
The script is run, unmodified, in several roles: train (N ranks), reference (DDP instead of
fully_shard), perturbed (the reference from weights one unit in the last place away: its
difference sets the tolerance), single (one process, the whole global batch), resume (same number
of ranks) and reshard (others). The verifier stops each run after K optimizer steps.
`{checkpoint}` in the arguments is one fresh folder that the train and resumed runs share.

examples:
  fsdp2 verify my-run                         a scaffold: its verify.yaml says how to run it
  fsdp2 verify train.py --nproc 4 -- --config small.yaml    a script, with arguments of its own
  fsdp2 verify train.py --save-args "--out {checkpoint}" --resume-args "--resume {checkpoint}"
  fsdp2 verify train.py --reference "old/train_ddp.py --small" -- --small
  fsdp2 verify -m pkg.train --nproc 4 -- --small  a module of a package
  fsdp2 verify train.py --only gradients --skip token-mean-of-means
  fsdp2 verify my-run -v                      list what passed and what is not applicable, too
  fsdp2 verify my-run --report json=report.json --report html=report.html
  fsdp2 verify my-run --report github --report junit=verify.xml --report sarif=verify.sarif
  fsdp2 verify my-run --baseline report.json  exit 1 only on failures that this report does not have
  fsdp2 verify --policy origin/main           a pull request cannot loosen the policy of its base
  fsdp2 verify                                every target of ./verify.yaml or ./pyproject.toml
  fsdp2 verify --target pretrain --report "json=out/{target}.json"

exit codes: 0 pass, 1 a rule failed, 2 bad usage, 4 something could not be checked (the report
says what), or --tier static found nothing: only runs give a pass; of several targets, the worst.
"""


OPTIONS = (
    (
        "--root",
        "DIR",
        (
            "the project's folder, if it is not the script's own: findings name the lines of its"
            " packages, too"
        ),
    ),
    ("--nproc", "N", "ranks (default 2)"),
    (
        "--steps",
        "K",
        (
            "optimizer steps to compare (default auto: 5 to 100, as a first run of the whole script"
            " suggests)"
        ),
    ),
    (
        "--windows",
        "F-L,...",
        (
            "further steps to compare, or none (default auto: where later steps change something,"
            " and the last ones)"
        ),
    ),
    (
        "--reshard-to",
        "N,M",
        (
            "other world sizes to resume on (default 1, twice --nproc, and 3 if the global batch"
            " divides)"
        ),
    ),
    (
        "--save-args",
        "ARGS",
        "arguments that make the script save a checkpoint, after one of the steps 1 to K-1",
    ),
    ("--resume-args", "ARGS", "arguments that make the script resume from that checkpoint"),
    (
        "--single-args",
        "ARGS",
        "arguments that make one process take the whole global batch at once",
    ),
    ("--reshard-args", "ARGS", "further arguments of the runs on other world sizes"),
    (
        "--prepare",
        "'SCRIPT ARGS'",
        "a script that is run once before all runs, and makes what they read",
    ),
    (
        "--reference",
        "'SCRIPT ARGS'",
        (
            "the script that this one was converted from, as one more oracle: run as it is, on one"
            " rank if it supports no others"
        ),
    ),
    (
        "--require",
        "A,B",
        (
            "what some run must do, or exit 4: checkpoint, resume, reshard, accumulation, bf16,"
            " compile, evaluation, gpu"
        ),
    ),
    ("--timeout", "S", "seconds for each launch (default 300)"),
    (
        "--device",
        "WHERE",
        "auto (GPUs if there is one for each rank, else CPU), cpu, cuda, cuda-on-cpu",
    ),
    (
        "--launcher",
        "HOW",
        (
            "fork (default), torchrun, or on several machines: slurm, ssh:HOST,HOST,"
            " kubectl:POD,POD, 'COMMAND {worker}'"
        ),
    ),
)


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = (
        "Run a training script, generated or your own, and check sharding, mathematics and"
        " checkpoints."
    )
    parser = add_command(
        commands,
        "verify",
        run,
        "run a training script on N ranks and verify it",
        description,
        EPILOG,
    )
    parser.usage = "fsdp2 verify [TARGET | -m MODULE] [options] [-- SCRIPT ARGS]"
    add = parser.add_argument
    target = (
        "a script, or a folder with verify.yaml or train.py; left out: the targets of verify.yaml"
        " or pyproject.toml here"
    )
    add("target", metavar="TARGET", type=Path, nargs="?", help=target)
    module = "run a module as `python -m` does, from the current folder (or TARGET)"
    add("-m", "--module", metavar="MODULE", help=module)
    for name, metavar, text in OPTIONS:
        add(name, metavar=metavar, help=text)
    watch = (
        "a value in the frames of the training loop (`ema.shadow`, `best_loss`, `module:name`) that"
        " must agree between ranks, after a "
    )
    watch += (
        "resume, on other numbers of ranks and in one process; `across=ranks,resume,world,single`"
        " or `rank-local` after it limits that"
    )
    add("--watch", metavar="'EXPR'", action="append", help=watch)
    how = (
        "how runs are kept from your files: auto (the best that this machine has), overlay, copy,"
        " guard; none: not at all"
    )
    add("--isolation", metavar="HOW", help=f"{how} (docs: references/verify.md)")
    allowed = (
        "a file or folder outside of the project that runs may change, for a machine that cannot"
        " isolate it"
    )
    add("--allow-writes", metavar="PATH", action="append", help=allowed)
    files = (
        "the same for the tensors and numbers in files that rank 0 writes (.pt, .safetensors, .npz,"
        " .json)"
    )
    add(
        "--watch-file",
        dest="watch",
        metavar="'GLOB'",
        action="append",
        type="file:{}".format,
        help=files,
    )
    add(
        "--budget",
        metavar="S",
        help="seconds after which no further run begins; what that leaves out is inconclusive",
    )
    for name, text in (
        (
            "--quick",
            (
                "only the train run, the DDP reference and the resume: the rules that need others"
                " are skipped"
            ),
        ),
        ("--thorough", "kill a rank at every stage of a save, not at one (slower)"),
        (
            "--oversubscribe",
            "with --device cuda: let several ranks share a GPU where there are too few",
        ),
    ):
        add(name, action="store_const", const=True, help=text)
    tiers = (
        "ranks (default); simulate: one process with a fake process group of --nproc ranks, no"
        " sockets, structure only; "
    )
    add("--tier", choices=TIERS, default="ranks", help=f"{tiers}static: the sources alone")
    size = (
        "with --tier simulate: at the size of production, on CUDA tensors that have shapes and no"
        " memory, as in `fsdp2 plan`"
    )
    add("--full-size", action="store_true", help=size)
    config = (
        "a verify.yaml, or a pyproject.toml with [tool.fsdp2]: the same keys as these options,"
        " targets, and the policy of a team"
    )
    add(
        "--config",
        metavar="FILE",
        type=Path,
        help=f"{config} (default: that of TARGET, or of the current folder)",
    )
    add(
        "--target",
        dest="named",
        metavar="NAME",
        help="only this one of the targets of the configuration",
    )
    reports = f"{HELP}; `{PLACE}` in PATH is the name of the target"
    add_options(
        parser,
        reports,
        "an earlier JSON report of this target: exit 1 only on failures that it does not have",
    )
    add(
        "--work",
        metavar="DIR",
        type=Path,
        help="keep traces and outputs of the runs in this new folder",
    )
    parser.set_defaults(script_args=None)


def run(options: argparse.Namespace) -> int:
    """Verify every target, write the reports, return the worst exit code."""
    from ...verifier.config.verify_file import config_in
    from ...verifier.integrations.base_branch import base_branch

    config = options.config
    if (
        options.target is None
        and options.module is None
        and config is None
        and (config := config_in(Path())) is None
    ):
        raise UserError(
            "nothing to verify: give a script, a folder, or -m MODULE; without them, this folder"
            " needs a verify.yaml, or [tool.fsdp2] in its pyproject.toml"
        )
    if options.full_size and options.tier != "simulate":
        raise UserError("--full-size: only with --tier simulate; ranks have real tensors")
    folder = config.parent if config is not None else options.target or Path()
    with base_branch(options.policy, folder) as checkouts:
        return _all(options, config, checkouts)


def _all(options: argparse.Namespace, config: Path | None, checkouts: Checkouts | None) -> int:
    from ...verifier.config.target import resolve_all
    from ...verifier.integrations.base_branch import changed_policy
    from ...verifier.pipeline import select
    from ...verifier.report import RENDERERS
    from ...verifier.rules.naming import unknown

    flags = {name: getattr(options, name) for name in FLAGS}
    flags["tier"] = None if options.tier == "ranks" else options.tier
    flags |= {"policy": options.policy, "args": options.script_args}
    targets = resolve_all(options.target, flags, config, options.named, unknown, checkouts)
    select(options.only, options.skip, options.tier)
    if options.work is not None and options.work.exists():
        raise UserError(f"{options.work}: exists already; --work needs a new folder")
    old = [_known(options.baseline, target, len(targets) > 1) for target in targets]
    names = [target.name or target.script.stem for target in targets]
    scripts = [target.script for target in targets]
    reports = reports_by_target(
        parsed_reports(options.report, options.json, RENDERERS), names, scripts
    )
    if checkouts is None and any(name == "github" for own in reports for name, _ in own):
        remarks = changed_policy(options.target or Path(), config, options.baseline)
        targets = [replace(one, policy=replace(one.policy, remarks=remarks)) for one in targets]
    codes = []
    for target, own, known in zip(targets, reports, old, strict=True):
        if len(targets) > 1:
            log(f"target {target.name}")
        codes.append(_one(options, target, own, known))
    return next(code for code in WORST if code in codes)


def _known(path: Path | None, target: Target, several: bool) -> Known | None:
    """The earlier report of this target, if one is given."""
    from ...verifier.report import baseline

    if path is None:
        return None
    if several and PLACE not in str(path):
        raise UserError(f"--baseline {path}: several targets need {PLACE} in the path")
    own = for_target(path, target.name or target.script.stem)
    report = baseline.load(own)
    baseline.must_be_of(own, report, target.describe())
    return own, report, target.policy.checkouts


def _one(
    options: argparse.Namespace, target: Target, reports: Sequence[Report], old: Known | None
) -> int:
    """Verify one target, write its reports, return its verdict's exit code.

    An interrupted one is reported, too.
    """
    from ...verifier.pipeline import verify
    from ...verifier.verdict import CutShort

    target = replace(target, full_size=options.full_size)
    work = options.work or temporary("verify")
    own = (work / target.name).resolve()
    rules = options.only, options.skip
    try:
        with Live(sys.stderr) as live:
            verdict = verify(target, own, *rules, sys.executable, progress=live, tier=options.tier)
    except CutShort as stop:
        _report(options, reports, stop.verdict, old)
        raise
    finally:
        if options.work is None:
            with defer_signals():
                remove(work)
    return _report(options, reports, verdict, old)


def _report(
    options: argparse.Namespace, reports: Sequence[Report], verdict: Verdict, old: Known | None
) -> int:
    """Write the reports; the exit code of the verdict."""
    from ...verifier.report import baseline, renderers

    if old is not None:
        verdict = baseline.held_against(verdict, *old)
    if verdict.suggestion and not _parses(verdict.suggestion):
        verdict = replace(verdict, suggestion="")
    if verdict.refused:
        log(f"environment error: {verdict.refused}")
    write_verdict(reports, verdict, renderers(verbose=options.verbose))
    return verdict.exit_code


def _parses(command: str) -> bool:
    """Whether this program takes a command that a report would suggest."""
    from . import parse

    try:
        with redirect_stderr(StringIO()):
            parse(shlex.split(command)[1:])
    except (UserError, SystemExit):
        return False
    return True
