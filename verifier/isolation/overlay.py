"""The mechanism "overlay": a mount namespace in which every place has a layer of the run's own
above it.

One process (`choose.py`) calls `begin` and holds the namespace; each process that manages a run
calls `enter`. A new root folder is assembled of overlays, one for each file system, and replaces
the old one. Kernel interfaces and devices are bound in as they are; shared memory is new; caches of
libraries are shared by the runs of a verification.

Without privileges (in a user namespace) a folder with further mounts below it cannot be the lower
part of an overlay, since the kernel keeps those mounts together. Such a folder, mostly `/`, is made
again of its entries.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from . import kernel
from .layers import LAYERS, PATH, UPPER, layer_of, name_of
from .mounts import AUTOMOUNT, INTERFACES, Mount, is_below, is_in, mounts, sockets
from .world import FILES, World

_AS_THEY_ARE = ("/dev", "/proc", "/sys")
_SHARED_MEMORY = "/dev/shm"
_WALKED = 2_000  # folders of the project that may be another user's
_ENTRIES = 20_000  # of a folder that is made again
_COPIED = 1 << 20  # bytes of a file in such a folder that can be written
_SOCKETS = 500
_FLAGS = {os.ST_NOSUID: kernel.NO_SUID, os.ST_NODEV: kernel.NO_DEVICES, os.ST_NOEXEC: 0x8}
_in_user_namespace = False


def begin(caches: tuple[tuple[str, str], ...]) -> None:
    """Give this process a mount namespace, in which caches have one layer for all runs.

    Raises OSError if it may not.
    """
    global _in_user_namespace
    user, group = os.getuid(), os.getgid()
    try:
        kernel.unshare(kernel.NEW_NAMESPACE)
    except PermissionError:
        try:
            kernel.unshare(kernel.NEW_NAMESPACE | kernel.NEW_USER)
        except (
            OSError
        ) as error:  # EPERM of a container's filter, ENOSPC of user.max_user_namespaces = 0
            raise OSError(
                error.errno, f"user namespaces are not allowed here: {error.strerror}", "unshare"
            ) from None
        _in_user_namespace = True
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    kernel.mount("none", "/", flags=kernel.RECURSIVE | kernel.SLAVE)
    for path, place in caches:
        layer, merged = Path(place, LAYERS), Path(place, "merged")
        merged.mkdir(parents=True, exist_ok=True)
        if Path(path).is_dir():
            _overlay(path, layer, str(merged))


def _join(holder: int) -> None:
    """Enter the namespaces of the process that has begun."""
    global _in_user_namespace
    of_user, of_mounts = (f"/proc/{holder}/ns/{name}" for name in ("user", "mnt"))
    _in_user_namespace = os.stat(of_user).st_ino != os.stat("/proc/self/ns/user").st_ino
    for name in (of_user, of_mounts) if _in_user_namespace else (of_mounts,):
        number = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        kernel.set_namespace(number)
        os.close(number)


def enter(world: World) -> dict[str, bool]:
    """Move this process into the world. Raises OSError if there is no world.

    The places below which files lie, and whether they have a layer; one that nobody can write to is
    left out.
    """
    if world.holder:
        _join(world.holder)
    kernel.unshare(kernel.NEW_NAMESPACE)
    root = Path(world.folder, "root")
    root.mkdir(parents=True)
    assembly = _Assembly(world, str(root))
    if _in_user_namespace:
        kernel.mount("tmpfs", str(root), "tmpfs", kernel.NO_SUID | kernel.NO_DEVICES, "mode=755")
    assembly.add("/")
    if lost := [path for path in world.roots if not assembly.is_covered(path)]:
        raise OSError(
            errno.EINVAL, f"overlayfs does not take the file system of {lost[0]}", "overlay"
        )
    assembly.shared_memory()
    for path in sockets()[:_SOCKETS]:
        if not is_in(path, world.work) and assembly.is_covered(path):
            with contextlib.suppress(OSError):  # in a folder that this user may not enter
                kernel.bind(path, assembly.at(path))
    for path, place in world.caches:
        Path(assembly.at(path)).mkdir(parents=True, exist_ok=True)
        kernel.bind(f"{place}/merged", assembly.at(path))
    kernel.bind(world.work, assembly.at(world.work))
    assembly.checkpoint()
    for path in world.allowed:
        kernel.bind(path, assembly.at(path), recursive=True)
    kernel.become_root_folder(str(root))
    if _in_user_namespace:
        kernel.drop_capabilities()
    return {**dict.fromkeys(assembly.covered, True), **dict.fromkeys(assembly.uncovered, False)}


class _Assembly:
    """The new root folder while it is made."""

    def __init__(self, world: World, root: str) -> None:
        self.world, self.root = world, root
        ours = (world.work, *(place for _, place in world.caches))
        found = [mount for mount in mounts() if not any(is_in(mount.path, one) for one in ours)]
        self.mounts = {mount.path: mount for mount in found}
        self.covered: list[str] = []
        self.uncovered: list[str] = []

    def at(self, path: str) -> str:
        """The place of a path in the new root folder."""
        return self.root + path if path != "/" else self.root

    def is_covered(self, path: str) -> bool:
        """Whether a path is in a layer, and not in an interface of the kernel."""
        known = (*self.mounts, *_AS_THEY_ARE, *self.covered)
        return max((one for one in known if is_in(path, one)), key=len, default="") in self.covered

    def add(self, path: str) -> None:
        """A folder, with the mounts below it."""
        mount = self.mounts.get(path, Mount(path, "", False))
        if path in _AS_THEY_ARE or mount.kind in INTERFACES:
            kernel.bind(path, self.at(path), recursive=True)
            if mount.kind == AUTOMOUNT and not any(is_below(path, one) for one in _AS_THEY_ARE):
                self.uncovered.append(path)  # what is mounted there later has no layer
                self._add_below(path)
            return
        if not Path(path).is_dir():  # a file that a container engine has mounted
            kernel.bind(path, self.at(path))
            self._make_read_only(self.at(path))
            return
        if _in_user_namespace and any(is_below(other, path) for other in self.mounts):
            self._make_again(path)
            return
        self._cover(path, mount)
        self._add_below(path)

    def _add_below(self, path: str) -> None:
        """The mounts below a folder."""
        below = [other for other in self.mounts if is_below(other, path)]
        for other in below:
            if not any(is_below(other, outer) for outer in below):
                self.add(other)

    def _cover(self, path: str, mount: Mount) -> None:
        """Lay a layer over one file system, or a folder of it."""
        layer = Path(self.world.folder, LAYERS)
        if _in_user_namespace:
            used = [os.path.dirname(cache) for cache, _ in self.world.caches]
            used += [os.environ.get("HOME", "/"), tempfile.gettempdir()]
            for folder in _foreign_folders(
                path, self.world.roots, [os.path.realpath(one) for one in used]
            ):
                _bring_up(folder, path, layer_of(Path(self.world.folder), path))
        try:
            _overlay(path, layer, self.at(path))
            self.covered.append(path)
        except OSError:  # a file system that overlayfs does not take
            kernel.bind(path, self.at(path), recursive=True)
            # all files of a vfat (`/boot/efi`) have one owner
            if not mount.read_only and (mount.kind != "vfat" or os.access(path, os.W_OK)):
                self.uncovered.append(path)
        if mount.read_only:
            self._make_read_only(self.at(path))

    def _make_again(self, path: str) -> None:
        """A folder of the entries that it has.

        Those that this user may not see are left out, but for the mounts in them.
        """
        self.covered.append(path)
        known = {other for other in self.mounts if is_below(other, path)}
        wanted = {
            f"{path.rstrip('/')}/{other[len(path.rstrip('/')) + 1 :].split('/')[0]}"
            for other in known
        }
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for number, entry in enumerate(entries):
                if number > _ENTRIES:
                    break
                self._entry(entry)
                wanted.discard(entry.path)
        for child in wanted:
            Path(self.at(child)).mkdir(parents=True, exist_ok=True)
            self.add(child)
        with contextlib.suppress(OSError):
            Path(self.at(path)).chmod(
                stat.S_IMODE(os.stat(path).st_mode) if os.access(path, os.W_OK) else 0o555
            )

    def _entry(self, entry: os.DirEntry[str]) -> None:
        target = self.at(entry.path)
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), target)
        elif entry.is_dir(follow_symlinks=False):
            Path(target).mkdir()
            if os.access(entry.path, os.X_OK) or any(
                is_in(other, entry.path) for other in self.mounts
            ):
                self.add(entry.path)
        elif entry.is_file() and os.access(entry.path, os.W_OK) and entry.stat().st_size <= _COPIED:
            shutil.copy2(entry.path, target)
        else:
            Path(target).touch()
            with contextlib.suppress(OSError):
                kernel.bind(entry.path, target)
                if entry.is_file():
                    self._make_read_only(target)

    @staticmethod
    def _make_read_only(target: str) -> None:
        flags = sum(flag for name, flag in _FLAGS.items() if os.statvfs(target).f_flag & name)
        kernel.mount("none", target, flags=kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY | flags)

    def shared_memory(self) -> None:
        """Shared memory of the run's own: what a killed rank leaves in it ends with the
        namespace.
        """
        if not Path(_SHARED_MEMORY).is_dir():
            return
        about = os.statvfs(_SHARED_MEMORY)
        target = self.at(_SHARED_MEMORY)
        there = bool(os.listdir(_SHARED_MEMORY))
        place = Path(self.world.folder, "shm")
        place.mkdir()
        size = f"size={about.f_blocks * about.f_frsize},mode=1777"
        kernel.mount(
            "tmpfs",
            str(place) if there else target,
            "tmpfs",
            kernel.NO_SUID | kernel.NO_DEVICES,
            size,
        )
        if there:  # data that somebody keeps in memory
            _overlay(_SHARED_MEMORY, place, target)

    def checkpoint(self) -> None:
        """The folder that holds `{checkpoint}`: the run's own, above those of the worlds whose
        files it finds.
        """
        own, target = (
            Path(self.world.folder, FILES),
            self.at(str(Path(self.world.checkpoint).parent)),
        )
        if bases := [f"{base}/{FILES}" for base in self.world.bases]:
            _mount(bases, own, Path(self.world.folder, "work"), target)
        else:
            kernel.bind(str(own), target)


def _as_below(upper: Path, lower: str) -> None:
    """Give a folder of a layer the owner and mode of the one below it.

    In a user namespace no other owner can be given: what this user may not write, nobody may.
    """
    about = os.stat(lower)
    mode = stat.S_IMODE(about.st_mode)
    if not _in_user_namespace:
        os.chown(upper, about.st_uid, about.st_gid)
    elif about.st_uid != os.getuid() and not os.access(lower, os.W_OK):
        mode &= 0o555
    upper.chmod(mode)


def _foreign_folders(path: str, roots: Sequence[str], used: Sequence[str]) -> list[str]:
    """The folders of other users and groups below `path`, on the way to the `roots` and to others
    that are `used`, and in the `roots`.

    overlayfs cannot bring a folder with its owner into a layer in a user namespace (EOVERFLOW), so
    these are made before.
    """
    found = [
        str(one)
        for name in (*roots, *used)
        if is_below(name, path)
        for one in Path(name, "_").parents
    ]
    for name in roots:
        inner = os.walk(name) if is_in(name, path) else ()
        found += [
            f"{place}/{folder}"
            for place, folders, _ in islice(inner, _WALKED)
            for folder in folders
        ]
    outermost = sorted(
        {one for one in found if is_below(one, path)}, key=lambda one: one.count("/")
    )
    return [one for one in outermost if Path(one).is_dir() and _is_foreign(os.stat(one))]


def _is_foreign(about: os.stat_result) -> bool:
    """Whether a user namespace, which knows one user and one group, cannot give a file the owner
    and group of that one.
    """
    return about.st_uid != os.getuid() or about.st_gid != os.getgid()


def unchangeable(roots: Sequence[str]) -> str:
    """A file of the project that this user may change, and overlayfs cannot bring into a layer in a
    user namespace; "" if none.
    """
    for name in roots if _in_user_namespace else ():
        for place, _, files in islice(os.walk(name), _WALKED):
            for path in (f"{place}/{file}" for file in files):
                with contextlib.suppress(FileNotFoundError):  # that a job removes meanwhile
                    about = os.lstat(path)
                    if (
                        not stat.S_ISLNK(about.st_mode)
                        and _is_foreign(about)
                        and os.access(path, os.W_OK)
                    ):
                        return path
    return ""


def _bring_up(folder: str, top: str, upper: Path) -> None:
    """Make a folder below `top` in the layer of `top`."""
    for one in reversed([folder, *map(str, Path(folder).parents)]):
        own = upper / os.path.relpath(one, top)
        if is_below(one, top) and not own.is_dir():
            own.mkdir(parents=True)
            _as_below(own, one)


def _overlay(path: str, layers: Path, target: str) -> None:
    """Show a folder at `target`, with a layer in the folder `layers` above it."""
    layer = layers / name_of(path)
    upper = layer / UPPER
    upper.mkdir(parents=True, exist_ok=True)
    (layer / PATH).write_bytes(os.fsencode(path))
    _as_below(upper, path)
    _mount([path], upper, layer / "work", target)


def _mount(lower: list[str], upper: Path, scratch: Path, target: str) -> None:
    """Mount an overlay of the folders of `lower`, the topmost first, and of `upper`, which receives
    what is written.
    """
    scratch.mkdir(exist_ok=True)
    # By number: a path may hold commas and colons, which would part options.
    opened = [
        os.open(name, os.O_PATH | os.O_DIRECTORY) for name in (*lower, str(upper), str(scratch))
    ]
    try:
        *lowers, above, room = (f"/proc/self/fd/{number}" for number in opened)
        options = f"lowerdir={':'.join(lowers)},upperdir={above},workdir={room}"
        # A folder of the lower part can be renamed, but in a user namespace: there os.rename fails
        # with EXDEV.
        options += ",userxattr" if _in_user_namespace else ",redirect_dir=on,index=off,metacopy=off"
        kernel.mount("overlay", target, "overlay", data=options)
    finally:
        for number in opened:
            os.close(number)
