"""`fsdp2 guard`: the laws in the real run, at its real size."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

from ...verifier.errors import FAIL, INCONCLUSIVE, PASS, UserError
from ...verifier.guard.settings import ON_BREACH, VARIABLE, Settings, read
from ..output import add_command, emit_json, say

SITE = Path(__file__).resolve().parents[2] / "verifier" / "guard" / "site"
OPTIONS = (
    ("every", "N", "steps between comparisons of all ranks (default %(default)s)"),
    ("repeat", "M", "comparisons between repeats of layers; 0: none (default %(default)s)"),
    ("hang", "S", "seconds without progress that are a hang (default %(default)g)"),
    ("out", "FILE", "the journal, which the starts of one run share (default %(default)s)"),
    ("hook", "COMMAND", "run this with each breach as JSON on stdin"),
    ("prometheus", "FILE", "keep a text file for node_exporter"),
)
EPILOG = f"""\
The command is run as it is, with two variables of the environment: {VARIABLE}, and PYTHONPATH, so
that each Python process watches itself. It changes no number of the run, joins no collective, and
a fault of its own never ends the run. Where a launcher hands on no environment, put `import
verified_fsdp2.guard` first in the script, and set {VARIABLE} in the launcher's own way.

examples:
  fsdp2 guard -- torchrun --nproc-per-node 8 train.py       watch it; findings go to stderr
  fsdp2 guard --every 50 --out run/guard.jsonl -- torchrun --nproc-per-node 8 train.py
  fsdp2 guard --on-breach checkpoint-and-stop -- torchrun --nproc-per-node 8 train.py
  fsdp2 guard --hook 'mail -s breach me@example.org' -- torchrun train.py
  fsdp2 guard report run/guard.jsonl                        what it has found
  fsdp2 guard report run/guard.jsonl --html guard.html      the same as a page, with curves
  fsdp2 guard report a/guard.jsonl b/guard.jsonl            several runs side by side

exit codes: those of the command ({86} where --on-breach ends it); of report: 0 no law was broken, 1
one was, 2 bad usage, 4 nothing was compared.
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = (
        "Watch a real training run: replicas agree, every parameter trains, samples, losses,"
        " resumes, hardware, hangs."
    )
    parser = add_command(commands, "guard", run, "the laws in the real run", description, EPILOG)
    parser.usage = "fsdp2 guard [options] -- COMMAND...  |  fsdp2 guard report FILE..."
    default, add = Settings(), parser.add_argument
    add("words", nargs="*", metavar="report FILE", help="report on journals of guarded runs")
    for name, metavar, text in OPTIONS:
        value = getattr(default, name.replace("-", "_"))
        add(f"--{name}", type=type(value), default=value, metavar=metavar, help=text)
    text = "what a broken law leads to (default %(default)s)"
    add("--on-breach", choices=ON_BREACH, default=default.on_breach, help=text)
    add("--html", type=Path, metavar="FILE", help="of report: also write a page")
    parser.set_defaults(script_args=[])


def run(options: argparse.Namespace) -> int:
    """Run the command under the guard, or report."""
    if options.words[:1] == ["report"]:
        return _report(options)
    if options.words or not options.script_args:
        raise UserError(
            "give the command after `--`: fsdp2 guard -- torchrun --nproc-per-node 8 train.py"
        )
    command = options.script_args
    settings = Settings(
        every=options.every,
        repeat=options.repeat,
        hang=options.hang,
        on_breach=options.on_breach,
        out=str(Path(options.out).absolute()),
        hook=options.hook,
        prometheus=str(Path(options.prometheus).absolute()) if options.prometheus else "",
    )
    try:
        words = read(settings.words()).words()
    except ValueError as error:
        raise UserError(str(error)) from error
    if shutil.which(command[0]) is None:
        raise UserError(f"{command[0]}: there is no such command")
    path = os.environ.get("PYTHONPATH", "")
    os.environ[VARIABLE] = words
    os.environ["PYTHONPATH"] = f"{SITE}{os.pathsep}{path}" if path else str(SITE)
    return os.execvp(command[0], command)


def _report(options: argparse.Namespace) -> int:
    from ...verifier.guard.report import read_run, text
    from ...verifier.guard.report_html import page

    if not options.words[1:]:
        raise UserError("give the journal: fsdp2 guard report run/guard.jsonl")
    runs = [read_run(Path(word)) for word in options.words[1:]]
    if options.html is not None:
        options.html.write_text(page(runs), encoding="utf-8")
    if options.json:
        emit_json({"runs": [one.as_json() for one in runs]})
    else:
        say("\n\n".join(text(one) for one in runs))
    if any(one.breaches for one in runs):
        return FAIL
    return PASS if all(one.of("check") for one in runs) else INCONCLUSIVE
