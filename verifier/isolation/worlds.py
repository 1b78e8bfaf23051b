"""Prepares the world of each run, and keeps what a run leaves for those that resume from it.

A run finds its files in one of these states:

- "scratch", "empty": as the user has them; `{checkpoint}` is empty
- "saved": with all that the run which `keeps` its files (the train run) has written
- "left": with all that the last run which `leaves` its files has written

In an overlay the paths of all worlds are the same, and the layers of an earlier run lie below those
of a later one. In a copy each world has a folder of its own. Where files of the train run name its
folder, runs that resume from it get that folder, one after the other (`exclusive`).
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from . import layers, mirror
from .choose import AUTO, Choice, Wish
from .leftovers import remove
from .mounts import is_below, is_in
from .world import CHECKPOINT, COPY, FILES, NONE, OVERLAY, World

COMMON = ("empty", "saved")  # the states that may need the common folder
_DEEPEST, _MOST = 4, 2_000  # of a listing of the checkpoint folder
_NOT_OUTPUTS = ("__pycache__", ".git")
_SHOWN = 3  # paths in a note


class Worlds:
    """The worlds of one verification, below `work`.

    `projects` and `cwd` are the folders of its target.
    """

    def __init__(
        self,
        work: Path,
        projects: Sequence[Path] = (),
        cwd: Path | None = None,
        choice: Choice | None = None,
        allowed: Sequence[Path] = (),
        environ: Mapping[str, str] | None = None,
        prepared: Path | None = None,
    ) -> None:
        self.work = work.resolve()
        self.choice = choice or Choice()
        # as reports name the folder of `{checkpoint}`
        self.checkpoint = self.work / FILES / CHECKPOINT
        self.projects = tuple(path.resolve() for path in projects or (work,))
        self.project = self.projects[0]
        self.cwd = (cwd or self.project).resolve()
        self.environ = os.environ if environ is None else environ
        self.home = Path(self.environ.get("HOME", "/")).resolve()
        self._allowed = tuple(str(path.resolve()) for path in allowed)
        self._common = self.work / "world"
        self._saved: Path | None = None  # the worlds that later runs begin from
        self._left: Path | None = None
        # where the run of a world that was set aside has found it
        self._lived: dict[Path, Path] = {}
        self._prepared = prepared if prepared is not None and prepared.is_dir() else None
        self.movable = True  # whether the saved files can be used from a copy in another folder
        self.written: list[str] = []  # by runs, outside of `{checkpoint}`
        self.largest = 0  # bytes that a world took

    @property
    def _copies(self) -> bool:
        """Whether a world has a copy of the project; one that the verifier itself has written needs
        none.
        """
        return self.choice.mechanism == COPY and not is_in(str(self.project), str(self.work))

    def exclusive(self, state: str) -> bool:
        """Whether a run needs the common folder, which one run at a time has."""
        return self.choice.mechanism != OVERLAY and state in COMMON and not self.movable

    def begin(self, folder: Path, state: str) -> World:
        """The world of the run in `folder`. Raises OSError if it cannot be had."""
        base = {"saved": self._saved, "left": self._left}.get(state)
        if self.choice.mechanism != OVERLAY and state == "left" and base is not None:
            return self._world(base, ())
        place = folder / "world"
        if self.choice.mechanism != OVERLAY and (state == "empty" or self.exclusive(state)):
            place = self._common
            remove(place)
        for path in (place / FILES / CHECKPOINT, place / "tmp", self.checkpoint):
            path.mkdir(parents=True, exist_ok=True)
        bases = [found for found in (base, self._prepared) if found is not None]
        if self.choice.mechanism != OVERLAY:
            self._copy(place, base)
        for found in bases[::-1] if self.choice.mechanism == OVERLAY else ():
            layers.inherit(found, place, share=found == self._prepared)
        return self._world(place, [str(found) for found in bases])

    def _world(self, place: Path, bases: Sequence[str]) -> World:
        mechanism, copies = self.choice.mechanism, self._copies
        overlaid = mechanism == OVERLAY
        roots = [*dict.fromkeys(map(str, (*self.projects, self.cwd)))]
        world = World(
            mechanism,
            str(self.work),
            str(place),
            str(self.checkpoint if overlaid else place / FILES / CHECKPOINT),
            bases=tuple(bases),
            allowed=self._allowed,
            caches=self.choice.caches,
            holder=self.choice.holder,
            mirror=str(place / "root") if copies else "",
            # without HOME it is `/`, which holds all that is not the user's
            roots=(*roots, str(self.home)) if copies and self.home != Path("/") else tuple(roots),
        )
        if overlaid or mechanism == NONE:
            return world
        named = (
            {name: world.inside_words(value) for name, value in self.environ.items()}
            if copies
            else {}
        )
        changed = {name: value for name, value in named.items() if value != self.environ[name]}
        return replace(world, environment={**changed, "TMPDIR": str(place / "tmp")})

    def _copy(self, place: Path, base: Path | None) -> None:
        """Fill a world that is no overlay."""
        root = place / "root"
        if base is not None:
            _copied(base / FILES, place / FILES, str(self._lived.get(base, base) / FILES))
        if not self._copies:
            return
        if (source := base or self._prepared) is not None:
            mirror.again(
                str(root), str(source / "root"), str(self._lived.get(source, source) / "root")
            )
        else:
            ways = [str(path) for path in (self.cwd, self.home, *self.projects[1:])]
            mirror.build(str(root), ways, str(self.project), str(self.work))

    def end(self, world: World, saves: Iterable[str], keeps: bool, leaves: bool) -> list[str]:
        """A run has ended, which saved to `saves`: what it wrote of the user's paths.

        Its world is kept, or taken away.
        """
        place, kept = Path(world.folder), list(saves)
        wrote = [path for path in self._wrote(world) if self._counts(path, kept)]
        self.written = [*dict.fromkeys([*self.written, *wrote])]
        self.largest = max(self.largest, _size(place))
        if keeps:
            self.movable = self.choice.mechanism == OVERLAY or not _names_itself(place)
            self._saved = self._set_aside(place)
        if leaves:
            if self._left is not None:
                remove(self._left)
            self._left = place
        elif not keeps:
            remove(place)
        return wrote

    def prepared(self, world: World) -> None:
        """What a preparation has written is found by all runs."""
        self._prepared = Path(world.folder)

    def _set_aside(self, place: Path) -> Path:
        if place != self._common:
            return place
        aside = self.work / "world.saved"
        remove(aside)
        place.rename(aside)
        self._lived[aside] = place
        return aside

    def _wrote(self, world: World) -> list[str]:
        if world.mechanism == OVERLAY:
            return layers.written(Path(world.folder))
        return mirror.changed(world.mirror, str(self.project)) if world.mirror else []

    def _counts(self, path: str, saves: Sequence[str]) -> bool:
        """Whether a path is an output of the script: below its folders and not hidden, or where it
        saves.
        """
        if is_in(path, str(self.work)) or any(part in _NOT_OUTPUTS for part in path.split("/")):
            return False
        for root in map(str, (*self.projects, self.cwd)):
            if is_below(path, root):
                return not any(
                    part.startswith(".") for part in path[len(root) + 1 :].split("/")[:-1]
                )
        return any(
            is_in(path, save) or is_in(save, path) or Path(path).parent == Path(save).parent
            for save in saves
        )

    def renamed(self, world: World) -> list[tuple[str, str]]:
        """(a path in the records of a run, the one that is read in its place)."""
        if world.mechanism == OVERLAY:
            return []
        places = [world.folder, *world.bases]
        found = [(f"{place}/{FILES}", str(self.work / FILES)) for place in places]
        return found + ([(f"{place}/root", "") for place in places] if world.mirror else [])

    def listing(self, left: bool = False) -> tuple[str, ...]:
        """What lies in the saved `{checkpoint}`, or in the one that was left to the next run,
        relative to it.
        """
        found: list[str] = []
        place = self._left if left else self._saved
        if place is None:
            return ()
        top = place / FILES / CHECKPOINT
        for folder, folders, files in os.walk(top):
            below = Path(folder).relative_to(top)
            found += [(below / name).as_posix() for name in (*folders, *files)]
            if len(below.parts) >= _DEEPEST or len(found) > _MOST:
                folders.clear()
        return tuple(sorted(found[:_MOST]))

    def notes(self) -> list[str]:
        """Notes for the report on paths of the user's that runs wrote."""
        if not self.written or self.choice.mechanism not in (OVERLAY, COPY):
            return []
        shown = ", ".join(self.written[:_SHOWN]) + (" ..." if len(self.written) > _SHOWN else "")
        where = (
            "in a layer of each run"
            if self.choice.mechanism == OVERLAY
            else "in a copy of the project"
        )
        return [
            f"the script writes outside of {{checkpoint}} ({shown}): this stayed {where}, nothing"
            " of yours was changed"
        ]


def _copied(source: Path, target: Path, lived: str) -> None:
    """Copy what a run has left beside and in `{checkpoint}`; links to the path at which it `lived`
    lead to the copy.
    """
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    for folder, folders, files in os.walk(target):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() and is_in(to := os.readlink(path), lived):
                path.unlink()
                path.symlink_to(str(target) + to[len(lived) :])


def wish(work: Path, *roots: Path, mechanism: str = AUTO) -> Wish:
    """What a launcher is asked for, whose worlds lie below `work`."""
    work = work.resolve()
    own = tuple(dict.fromkeys(str(root.resolve()) for root in roots))
    # a project that lies in a cache has a layer for each run, as any other
    shared = tuple(
        one for one in caches(work, os.environ) if not any(is_in(root, one[0]) for root in own)
    )
    return Wish(mechanism, str(work), own, shared)


def caches(work: Path, environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """(a folder in which libraries keep what they have downloaded or compiled, the place of its
    layer), for all runs.
    """
    home = environ.get("HOME", "")
    found = [environ.get("XDG_CACHE_HOME") or f"{home}/.cache", f"{home}/.triton", f"{home}/.nv"]
    found += [f"{environ.get('TMPDIR', '/tmp')}/torchinductor_{environ.get('USER') or _user()}"]
    names = (
        "HF_HOME",
        "TORCH_HOME",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "CUDA_CACHE_PATH",
    )
    found += [environ[name] for name in names if environ.get(name)]
    paths = sorted({os.path.realpath(path) for path in found if path.startswith("/")})
    outer = [path for path in paths if not any(is_below(path, other) for other in paths)]
    kept = [path for path in outer if not is_in(str(work), path) and path != os.path.realpath(home)]
    return tuple((path, str(work / "caches" / str(number))) for number, path in enumerate(kept))


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _size(folder: Path) -> int:
    """Bytes that a folder takes on the disk."""
    total = 0
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(f"{place}/{name}").st_blocks * 512
            except OSError:
                continue
    return total


def _names_itself(place: Path) -> bool:
    """Whether a file in a world contains its path: then only this folder will do for those that
    resume from it.
    """
    name = os.fsencode(place)
    return any(
        _holds(Path(folder, file), name) for folder, _, files in os.walk(place) for file in files
    )


def _holds(path: Path, name: bytes) -> bool:
    """Whether a file contains a path; one that cannot be read may.

    A link is made anew with the copy.
    """
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return content.find(name) >= 0
    except ValueError:  # an empty file
        return False
    except OSError:
        return True
