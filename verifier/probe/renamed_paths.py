"""Saved paths that the script renames or removes."""

import os

from ..trace.events import Removed, Renamed
from . import crash
from .dispatcher import Call
from .save_contents import place_of
from .session import Session


class Moved:
    """The paths of this rank's saves, under the names that they have by now."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.targets: set[str] = set()

    def _holds(self, path: str) -> bool:
        return any(t == path or t.startswith(path + os.sep) for t in self.targets)

    def about_to_rename(self, call: Call) -> None:
        """A path is about to be renamed."""
        if self._holds(place_of(call.given(0, "src"))):
            crash.in_change(self.session, crash.RENAME)

    def renamed(self, call: Call) -> None:
        """A path was renamed; recorded if a save wrote there."""
        old, new = place_of(call.given(0, "src")), place_of(call.given(1, "dst"))
        if self._holds(old):
            self.targets.add(new)
            self.session.write(Renamed(old=old, new=new, at_line=self.session.here()))

    def about_to_remove(self, call: Call) -> None:
        """A path is about to be removed; recorded if a save wrote there."""
        path = place_of(call.given(0, "path"))
        if call.kwargs.get("dir_fd") is None and self._holds(path) and os.path.lexists(path):
            self.session.write(Removed(path=path, at_line=self.session.here()))


def install(session: Session) -> None:
    """Subscribe to renames and removals."""
    moved = session.one(Moved)
    for name in ("os:rename", "os:replace"):
        session.around(name, before=moved.about_to_rename, after=moved.renamed)
    for name in ("os:remove", "os:unlink", "shutil:rmtree"):
        session.around(name, before=moved.about_to_remove)
