"""The only writer: results on stdout, logs on stderr; and the parts of a command line that all
commands share.
"""

from __future__ import annotations

import argparse
import errno
import os
import stat
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from ..verifier.report.sanitize import sanitize
from ..verifier.report.wrapping import paragraphs, width, wrapped

_NOT_LOOKED_AT = (
    "not looked at (--offline): data, tokenizer, pretrained weights; train.py checks them where it"
    " runs"
)
_URLS = "not looked at (URLs): {}; prepare.py reads them where it runs"
LINES, CHARACTERS = 150, 8_000  # of an error; what agents read of one command's output


class Help(argparse.HelpFormatter):
    """Help as wide as the terminal; argparse itself imports half a dozen modules to ask for its
    width.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return paragraphs(text)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str,
    epilog: str,
) -> Any:
    """The parser of a command, with `--json`."""
    parser = commands.add_parser(
        name, help=summary, description=description, epilog=epilog, formatter_class=Help
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.set_defaults(run=run)
    return parser


def add_set(parser: Any, text: str = "change one value of the spec (repeatable)") -> None:
    """`--set KEY=VALUE`."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)


def add_offline(parser: Any) -> None:
    """`--offline`."""
    text = "data, tokenizer and weights need not be here; they are checked where training runs"
    parser.add_argument("--offline", action="store_true", help=text)


def add_no_plan(parser: Any) -> None:
    """`--no-plan`."""
    text = "nothing about the memory of the device that launch names"
    parser.add_argument("--no-plan", dest="plan", action="store_false", help=text)


def say_not_looked_at(offline: bool, urls: Sequence[str]) -> None:
    """Which files of a spec were not opened, if any were not."""
    if offline:
        say(_NOT_LOOKED_AT)
    elif urls:
        say(_URLS.format(", ".join(urls)))


def say(text: str) -> None:
    """Write a result line to stdout."""
    put(text, sys.stdout)


def log(text: str) -> None:
    """Write progress or a warning to stderr, wrapped for a terminal.

    Nothing that it quotes is a command to a CI system, or a credential.
    """
    from ..verifier.report.secrets import redact_secrets

    text = redact_secrets(text)
    if sys.stderr.isatty():
        lines = text.split("\n")
        text = "\n".join(
            part
            for line in lines
            for part in ([line] if line[:1].isspace() else wrapped(line, "", "  "))
        )
    put(sanitize(text), sys.stderr)


def bounded(text: str) -> str:
    """An error of at most LINES lines and CHARACTERS characters: what quotes its input can be as
    long as that.
    """
    cut = "\n".join(text[:CHARACTERS].split("\n")[:LINES])
    return text if cut == text else f"{cut} ... (cut)"


def open_standard_streams() -> None:
    """Give a stream that the caller has closed (`2>&-`) to /dev/null.

    Otherwise `sys.stderr` is None, and the next file that is opened gets its descriptor: what a
    child process prints would be written into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # the lowest free descriptor is this one
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123


def put(text: str, stream: TextIO) -> None:
    """Print to a stream; a character that the terminal's encoding lacks is shown as `\\u2713`.

    Whoever reads it may have left: the exit code and the reports in files are for others.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
    except OSError as error:
        if not _has_no_reader(stream, error):
            raise
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())  # what is still in its buffer goes there, too
        os.close(null)


def _has_no_reader(stream: TextIO, error: OSError) -> bool:
    """Whether the pipe was closed (`| head`), or the terminal has gone, as after SIGHUP."""
    if error.errno == errno.EIO:
        return stat.S_ISCHR(os.fstat(stream.fileno()).st_mode)
    return error.errno == errno.EPIPE


def emit_json(value: Any) -> None:
    """Write one JSON document to stdout."""
    import json

    say(json.dumps(value, indent=2))
