"""`fsdp2`: parses, dispatches, and maps errors to exit codes.

Each command is a file beside this one.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import re
import signal
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from ... import __version__
from ...verifier.config.reading.inputs import Refused
from ...verifier.errors import (
    INCONCLUSIVE,
    INTERRUPTED,
    OUR_FAULT,
    USAGE,
    Interrupted,
    MachineRefuses,
    UserError,
)
from ...verifier.isolation.refusal import ELSEWHERE
from ..output import Help, bounded, log, open_standard_streams, put

COMMANDS = (
    "new",
    "recipe",
    "diff",
    "update",
    "lint",
    "convert",
    "verify",
    "plan",
    "guard",
    "spec",
    "explain",
    "report",
    "doctor",
    "install",
)
# Options whose value is arguments of a script, or of `verify`.
OF_A_SCRIPT = ("--save-args", "--resume-args", "--single-args", "--reshard-args", "--verify")
# errno of an OSError anywhere: a fault of the machine, or of a path that was given
ENVIRONMENT_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE),
    *(errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
)
PATH_ERRORS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM)
PACKAGES = {
    "yaml": "pyyaml",
    "jsonschema": "jsonschema",
    "jinja2": "jinja2",
    "torch": "torch",
    "numpy": "numpy",
    "libcst": "libcst",
}
EPILOG = """\
exit codes: 0 pass, 1 a check failed or something differs, 2 bad usage or bad spec, 3 our own
fault, 4 inconclusive or an environment error (no sockets, too few devices), 130 interrupted (129
SIGHUP, 143 SIGTERM).

examples:
  fsdp2 spec check examples/quickstart.yaml     is this spec valid?
  fsdp2 new examples/quickstart.yaml my-run     write a training project
  fsdp2 diff my-run                             your edits, and what its spec would change
  fsdp2 update my-run --set train.steps=1000    apply its spec and this version; your edits stay
  fsdp2 lint train.py                           what the sources alone show, in milliseconds
  fsdp2 convert train_ddp.py -o train_fsdp2.py  convert, mark the rest, verify against the original
  fsdp2 verify my-run                           run it: 2 ranks, DDP, one process, resume, reshard
  fsdp2 verify train.py -- --config small.yaml  the same for a script of your own
  fsdp2 plan my-run --nproc 64 --device-memory 80GiB  does it fit? without the GPUs
  fsdp2 guard -- torchrun train.py              the laws in the real run
  fsdp2 explain optim-before-shard              what a rule checks, why, and the fix
  fsdp2 report matches-ddp report.json          what is needed to report a finding
  fsdp2 install --user                          put the skill where coding agents look
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_standard_streams()
    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        signal.signal(signal.SIGTERM, _interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, _interrupt)
    try:
        options = parse(arguments)
        code: int = options.run(options)
        return code
    except UserError as error:
        log(bounded(str(error)))
        return USAGE
    except MachineRefuses as error:
        log(f"environment error: {error}")
        return INCONCLUSIVE
    except KeyboardInterrupt as stop:
        log("interrupted")
        return stop.code if isinstance(stop, Interrupted) else INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            return _report_bug(error, arguments)
        log(
            f"this Python has no {error.name}: {sys.executable} -m pip install"
            f" {PACKAGES[error.name]}"
        )
        return USAGE
    except OSError as error:
        known = error.errno in (*ENVIRONMENT_ERRORS, *PATH_ERRORS)
        if not known and not isinstance(error, Refused):
            return _report_bug(error, arguments)
        refused = error.errno in ENVIRONMENT_ERRORS
        full = error.errno in (errno.ENOSPC, errno.EDQUOT) and _is_temporary(error.filename)
        words = f"{error.strerror}: {error.filename}" + (f"; {ELSEWHERE}" if full else "")
        log(bounded(f"{'environment error: ' if refused else ''}{words}"))
        return INCONCLUSIVE if refused else USAGE
    except Exception as error:
        return _report_bug(error, arguments)


def _is_temporary(path: object) -> bool:
    """Whether a path is in the temporary folder; where none can be had, tempfile names the ones
    that it has tried.
    """
    import tempfile

    try:
        return path is None or str(path).startswith(tempfile.gettempdir())
    except OSError:
        return True


def _interrupt(number: int, frame: object) -> NoReturn:
    """SIGTERM and SIGHUP clean up like SIGINT."""
    if number == signal.SIGHUP:  # the terminal and the shell may both send it: let the clean-up end
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise Interrupted(128 + number)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command; what follows a bare `--` is for the verified script, in
    `script_args`.
    """
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    named = [word for word in words[:1] if word in COMMANDS]
    if words and not named and not words[0].startswith("-"):
        from ...verifier.config.reading.words import similar

        near = similar(words[0], list(COMMANDS))
        raise UserError(
            f"unknown command {words[0]!r};"
            f" {f'did you mean {near!r}?' if near else 'see fsdp2 --help'}"
        )
    parser, commands = _parser(named or COMMANDS)
    known = {name for one in commands.values() for name in one._option_string_actions}
    options, unknown = parser.parse_known_args(_joined(words[:cut], known))
    if unknown:
        own = "; arguments of the script go after `--`" if named in (["verify"], ["plan"]) else ""
        raise UserError(
            f"unrecognized arguments: {' '.join(unknown)}{own}; see fsdp2 {words[0]} --help"
        )
    if cut < len(words) and not hasattr(options, "script_args"):
        raise UserError("only verify, plan and guard take arguments after `--`")
    if cut < len(words):
        options.script_args = words[cut + 1 :]
    return options


def _joined(words: Sequence[str], own: Collection[str]) -> list[str]:
    """`--resume-args --resume` as `--resume-args=--resume`: argparse would take the value for an
    option of ours. It is one only if it has the name of one.
    """
    found: list[str] = []
    for word in words:
        value = word.startswith("-") and word.partition("=")[0] not in own
        if value and found and found[-1] in OF_A_SCRIPT:
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


class Parser(argparse.ArgumentParser):
    """A parser whose errors are bounded, too, and whose help needs no reader."""

    def error(self, message: str) -> NoReturn:
        """Print the message and the usage, and exit 2."""
        name = re.match(r"argument (--\S+): expected one argument$", message)
        if name is not None:
            message += f" (one that begins with a dash: {name[1]}=-...)"
        super().error(bounded(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help, version or an error as all else is printed."""
        if message:
            put(message.removesuffix("\n"), file or sys.stderr)


def _parser(names: Sequence[str]) -> tuple[Parser, dict[str, Parser]]:
    """The parser of these commands, and that of each; one that is named is the only one that must
    be imported.
    """
    parser = Parser(
        prog="fsdp2",
        description="Write FSDP2 training code from a spec, and verify any FSDP2 training script.",
        epilog=EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("--version", action="version", version=f"verified-fsdp2 {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in names:
        import_module(f".{name}", __package__).add_parser(commands)
    return parser, commands.choices


def _report_bug(error: Exception, arguments: Sequence[str]) -> int:
    """Report a bug of fsdp2: two lines, and a log with the traceback to paste into an issue."""
    import tempfile
    import traceback

    handle, path = tempfile.mkstemp(prefix="fsdp2-error-", suffix=".log")
    text = f"verified-fsdp2 {__version__}, Python {sys.version}\narguments: {list(arguments)}\n\n"
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text + "".join(traceback.format_exception(error)))
    log(f"this is a fault of fsdp2 itself, not of your code: {type(error).__name__}: {error}")
    log(f"please report it with {Path(path)}")
    return OUR_FAULT
