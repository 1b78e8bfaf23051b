"""The two ways in which a command ends without a verdict, and the exit codes of every command."""

PASS = 0
FAIL = 1
USAGE = 2
OUR_FAULT = 3
INCONCLUSIVE = 4
INTERRUPTED = 130


class UserError(Exception):
    """Something the user gave is wrong (exit 2). The message says what, where, and what to do."""


class MachineRefuses(Exception):
    """This machine cannot run what was asked (exit 4): no sockets, too few devices, no fork."""
