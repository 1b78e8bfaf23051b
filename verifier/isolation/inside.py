"""In a rank, before the script: what Python itself has to know of the world in which it runs."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .world import OVERLAY, World


def in_world(data: dict[str, Any]) -> None:
    """Find modules of the project in the copy; let folders be renamed in an overlay."""
    if not data:
        return
    world = World.of(data)
    if world.mirror:
        sys.path[:] = [world.inside(path) if path.startswith("/") else path for path in sys.path]
    if world.mechanism == OVERLAY and _in_user_namespace():
        os.rename, os.replace = _copying(os.rename), _copying(os.replace)


def _in_user_namespace() -> bool:
    return Path("/proc/self/uid_map").read_text(encoding="ascii").split()[2:] == ["1"]


def _copying(rename: Callable[..., None]) -> Callable[..., None]:
    """`os.rename` that copies a folder where the kernel cannot rename it.

    Without privileges overlayfs renames no folder of its lower part (EXDEV), which scripts do:
    `latest` to `previous`.
    """

    def renamed(src: Any, dst: Any, **options: Any) -> None:
        try:
            rename(src, dst, **options)
        except OSError as error:
            src, dst = _from(options.get("src_dir_fd"), src), _from(options.get("dst_dir_fd"), dst)
            if error.errno != errno.EXDEV or not _on_one_file_system(src, dst):
                raise
            draft = f"{os.fsdecode(dst)}.{os.getpid()}.fsdp2"
            shutil.copytree(src, draft, symlinks=True)
            rename(draft, dst)
            shutil.rmtree(src)

    renamed.__name__ = rename.__name__
    renamed.__wrapped__ = rename  # type: ignore[attr-defined]
    return renamed


def _from(folder: int | None, path: Any) -> Any:
    """A path that starts from the folder of a descriptor, as one that does not."""
    return path if folder is None else f"/proc/self/fd/{folder}/{os.fsdecode(path)}"


def _on_one_file_system(source: Any, target: Any) -> bool:
    above = os.path.dirname(os.path.abspath(os.fsdecode(target)))
    return (
        os.path.isdir(source)
        and not os.path.islink(source)
        and os.stat(source).st_dev == os.stat(above).st_dev
    )
