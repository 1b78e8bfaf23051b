"""Reads checkpoints in one process and records their content, in the form in which
`save_contents.py` records what a save is given.

The files are those that the verified run has just written. DCP pickles its `.metadata`, which
can run code when it is read; objects in the data files are read with `weights_only=True`, and in a
file of `torch.save` placeholders stand for those of classes that this does not allow.
"""

import argparse
import collections
import io
import pathlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.serialization import get_unsafe_globals_in_checkpoint

from ..trace.events import End, InspectedCheckpoint, SavedEntry
from ..trace.writer import Writer
from .save_contents import entries, entry

# Larger checkpoints do not fit into this process's memory: they are said not to be read.
LIMIT = 8 << 30  # bytes of the largest checkpoint that is read
_TOO_LARGE = f"the checkpoint is larger than {LIMIT >> 30} GiB and was not read"


def open_all(paths: list[str], writer: Writer) -> int:
    """Record the content of each checkpoint; returns the exit code 0."""
    for path in paths:
        try:
            writer.write(_inspected(path))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:300]
            writer.write(InspectedCheckpoint(path=path, format="unread", error=text))
    writer.write(End(how="return"))
    return 0


def _inspected(path: str) -> InspectedCheckpoint:
    file = Path(path)
    if file.is_dir():
        return _dcp(path)
    if not file.is_file():
        return InspectedCheckpoint(path=path)
    if file.stat().st_size > LIMIT:
        return InspectedCheckpoint(path=path, format="torch", error=_TOO_LARGE)
    with torch.serialization.safe_globals(_plain_types()):
        # objects of the script's own classes stand beside its tensors (mmengine: its message hub)
        others = get_unsafe_globals_in_checkpoint(file)
        with torch.serialization.safe_globals([(_placeholder(name), name) for name in others]):
            state = torch.load(file, map_location="cpu", weights_only=True)
    return InspectedCheckpoint(path=path, format="torch", entries=entries(state))


def _dcp(path: str) -> InspectedCheckpoint:
    folder = Path(path)
    if not (folder / ".metadata").is_file():
        return InspectedCheckpoint(path=path, format="dcp", error="the folder holds no .metadata")
    metadata = FileSystemReader(folder).read_metadata()
    stored = {getattr(info, "relative_path", "") for info in (metadata.storage_data or {}).values()}
    lost = sorted(name for name in stored if name and not (folder / name).is_file())
    if lost:
        error = f"{len(lost)} of the {len(stored)} files that .metadata names are missing"
        return InspectedCheckpoint(path=path, format="dcp", missing_files=lost, error=error)
    whole = {
        k: i
        for k, i in metadata.state_dict_metadata.items()
        if isinstance(i, TensorStorageMetadata)
    }
    if sum(i.size.numel() * i.properties.dtype.itemsize for i in whole.values()) > LIMIT:
        return InspectedCheckpoint(path=path, format="dcp", error=_TOO_LARGE)
    state: dict[str, Any] = {
        k: torch.empty(i.size, dtype=i.properties.dtype) for k, i in whole.items()
    }
    state |= dict.fromkeys((key for key in metadata.state_dict_metadata if key not in whole), None)
    planner = _Reader()
    load(state, storage_reader=FileSystemReader(folder), planner=planner, no_dist=True)
    found = {key: entry(state[key]) for key in whole}
    return InspectedCheckpoint(path=path, format="dcp", entries={**found, **planner.objects})


def _plain_types() -> list[Any]:
    """Types of plain data that scripts put into checkpoints: parsed arguments, paths, the arrays of
    a generator state.
    """
    found: list[Any] = [
        argparse.Namespace,
        pathlib.PosixPath,
        collections.Counter,
        collections.deque,
    ]
    if (numpy := sys.modules.get("numpy")) is not None:
        arrays = (
            numpy.empty(0, dtype) for dtype in ("uint32", "uint8", "int64", "float32", "float64")
        )
        found += [numpy.ndarray, numpy.dtype, *{type(array.dtype) for array in arrays}]
        found += [numpy.empty(0).__reduce__()[0], numpy.float64(0).__reduce__()[0], numpy.float64]
    return found


def _placeholder(name: str) -> Any:
    """A class that stands for another, of whose objects no code runs and nothing is kept."""

    def ignored(self: Any, *values: Any) -> None:
        pass

    return type(name, (), {"__init__": ignored, "__setstate__": ignored})


class _Reader(DefaultLoadPlanner):
    """Reads tensors, and objects that are plain data."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.objects: dict[str, SavedEntry] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            found = torch.load(value, weights_only=True)
        except Exception:
            self.objects[read_item.dest_index.fqn] = SavedEntry(
                kind="object", value="not plain data"
            )
        else:
            self.objects[read_item.dest_index.fqn] = entry(found)
