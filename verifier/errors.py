"""The ways in which a command ends without a whole verdict, and the exit codes of every command."""

PASS = 0
FAIL = 1
USAGE = 2
OUR_FAULT = 3
INCONCLUSIVE = 4
INTERRUPTED = 130
PROBE_FAILED = 70  # of a rank, not of a command: the verifier itself failed in it
LONGEST = 1000  # characters of an error's text that are kept


class UserError(Exception):
    """Something the user gave is wrong (exit 2). The message says what, where, and what to do."""


class MachineRefuses(Exception):
    """The environment cannot run what was requested (exit 4): no sockets, too few devices, no
    fork.
    """


class Interrupted(KeyboardInterrupt):
    """A signal has asked us to end (exit `code`: 130 SIGINT, 143 SIGTERM, 129 SIGHUP)."""

    def __init__(self, code: int = INTERRUPTED) -> None:
        super().__init__(code)
        self.code = code


_NO_PROCESS = "no further process or thread may be started (ulimit -u, pids of the cgroup)"
_NO_MEMORY = "no memory is left (ulimit -v, memory of the cgroup)"
_STARVED = {
    **dict.fromkeys(("Resource temporarily unavailable", "can't start new thread"), _NO_PROCESS),
    **dict.fromkeys(
        ("MemoryError", "Cannot allocate memory", "bad_alloc", "Memory allocation still failed"),
        _NO_MEMORY,
    ),
}


def starving(text: str) -> str:
    """Which limit on processes or memory an error's text or a log shows; "" for none."""
    return next((f"{said}: {why}" for said, why in _STARVED.items() if said in text), "")


def text_of(error: BaseException) -> str:
    """`ErrorName: message`; an ImportError or AttributeError names the symbol that is missing."""
    try:
        return f"{type(error).__name__}: {error}"[:LONGEST]
    except Exception:
        return type(error).__name__
