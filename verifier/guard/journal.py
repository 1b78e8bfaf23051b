"""What the guard writes: `guard.jsonl` of rank 0, and `guard.rank3.jsonl` of a rank that has
something of its own to say. Imports no torch.

Lines: `start`, `check` (curves), `breach`, `note`, `save`, `error` (of the guard), `end`. A file
that cannot be written makes it quiet; the run goes on.
"""

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..analysis.wording import some
from ..report.secrets import redact_secrets

SCHEMA = 1
_MOST = 50  # breaches of a law that one rank writes
_SECONDS = 60.0  # that a hook may take
_NAMES = 12  # parameters that a breach names


@dataclass
class Breach:
    """A law that does not hold.

    `since`: the last step at which it was seen to hold, None if never; `place`: file:line of the
    user's code; `command`: what shows it small, "" if nothing can; `key`: breaches with the same
    one are written once.
    """

    law: str
    step: int
    message: str
    ranks: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    since: int | None = None
    place: str = ""
    edit: str = ""
    command: str = ""
    key: str = ""

    def text(self) -> str:
        """One line for a terminal."""
        parts = [f"step {self.step}: {self.law}: {self.message}"]
        parts += [f"at {self.place}"] if self.place else []
        parts += [self.edit] if self.edit else []
        return "; ".join(parts) + (f" | {self.command}" if self.command else "")


class Journal:
    """The file of one rank. `on_breach` is called with each breach that is new."""

    def __init__(self, out: str, rank: int, hook: str = "") -> None:
        path = Path(out)
        self.rank = rank
        self.path = path if rank == 0 else path.with_suffix(f".rank{rank}{path.suffix}")
        self.breaches: list[Breach] = []
        self._seen: dict[tuple[str, str], int] = {}
        self._of_law: dict[str, int] = {}
        self._quiet = False
        self._hook = hook
        self._errors: set[str] = set()

    def write(self, kind: str, **fields: Any) -> None:
        """Append one line."""
        if self._quiet:
            return
        line = {"kind": kind, "time": round(time.time(), 3), "rank": self.rank, **fields}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._quiet = True
            self.say(f"{self.path}: {error.strerror}; nothing more is written, the run goes on")

    def breach(self, found: Breach) -> bool:
        """Write a breach that is new, print it, and run the hook; whether it is new."""
        key = found.law, found.key or found.message
        self._seen[key] = self._seen.get(key, 0) + 1
        self._of_law[found.law] = self._of_law.get(found.law, 0) + (self._seen[key] == 1)
        if self._seen[key] > 1 or self._of_law[found.law] > _MOST:
            return False
        fields = {name: value for name, value in asdict(found).items() if name != "key"}
        fields["names"], fields["more_names"] = found.names[:_NAMES], len(found.names[_NAMES:])
        self.breaches.append(found)
        self.write("breach", **fields)
        self.say(found.text())
        if self._hook:
            self._run_hook(fields)
        return True

    def note(self, text: str, **fields: Any) -> None:
        """Write what is said once and is no breach, such as a law that cannot be held."""
        if text not in self._errors:
            self._errors.add(text)
            self.write("note", text=text, **fields)

    def error(self, where: str, error: BaseException) -> None:
        """An error of the guard itself: one line, each text once."""
        text = f"{where}: {type(error).__name__}: {error}"[:500]
        if text not in self._errors:
            self._errors.add(text)
            self.write("error", text=text)
            self.say(f"fault of the guard itself, the run goes on: {text}")

    def say(self, text: str) -> None:
        """Print one line on stderr."""
        try:
            print(f"fsdp2 guard: {redact_secrets(text)}", file=sys.stderr, flush=True)
        except (OSError, ValueError):
            return

    def _run_hook(self, fields: dict[str, Any]) -> None:
        """Run the user's command, which gets the breach as JSON; its end is not waited for."""
        command, text = ["/bin/sh", "-c", self._hook], json.dumps(fields)

        def run() -> None:
            try:
                subprocess.run(
                    command, input=text, text=True, timeout=_SECONDS, start_new_session=True
                )
            except (OSError, subprocess.SubprocessError) as error:
                self.error("hook", error)

        threading.Thread(target=run, name="fsdp2-guard-hook", daemon=True).start()


def of_ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 1, 5`, of many the first."""
    return f"rank{'s' * (len(ranks) != 1)} {some(map(str, ranks), 8)}"
