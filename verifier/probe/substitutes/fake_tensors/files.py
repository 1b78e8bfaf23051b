"""Files are saved empty; data are loaded in this process, whose tensors no other process could be
sent.
"""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ...capacity.recorder import SAVE, Recorder
from ...dispatcher import Call
from ...session import Session

_CHECKPOINT = "torch.distributed.checkpoint"


def install(session: Session) -> None:
    """Replace the functions that write, and the workers of data loaders."""

    def saved(call: Call, proceed: Callable[[], Any]) -> None:
        Recorder.now.phase(SAVE)
        _touch(call.given(1, "f"))

    def saved_sharded(call: Call, proceed: Callable[[], Any]) -> None:
        Recorder.now.phase(SAVE)
        if (folder := call.kwargs.get("checkpoint_id")) is not None:
            _touch(Path(folder, ".metadata"))

    def saved_later(call: Call, proceed: Callable[[], Any]) -> Any:
        saved_sharded(call, proceed)
        done: Any = Future()
        done.set_result(None)
        done.staging_completion = done.upload_completion = (
            done  # of the response that a save with a stager of its own gives
        )
        return done

    def loads(call: Call) -> None:
        call.args = call.args[:5]  # the sixth is the number of workers
        call.kwargs["num_workers"] = 0
        for name in (
            "prefetch_factor",
            "persistent_workers",
            "timeout",
            "multiprocessing_context",
            "worker_init_fn",
        ):
            call.kwargs.pop(name, None)

    session.around("torch:save", replace=saved)
    session.around(f"{_CHECKPOINT}:save", replace=saved_sharded)
    session.around(f"{_CHECKPOINT}:async_save", replace=saved_later)
    session.around("torch.utils.data:DataLoader.__init__", before=loads)


def _touch(path: Any) -> None:
    """Make an empty file, for which the script may look."""
    if isinstance(path, str | Path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).touch()
