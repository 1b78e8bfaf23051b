"""How ranks compare: each leaves a small text in the store of the process group, rank 0 reads them.

No collective: one that a rank does not join hangs all others, and a guard must never end a run. A
store is there under every launcher, since `init_process_group` needs it. What a rank leaves does
not grow with the model or the number of ranks (`laws/`); rank 0 reads all of it.
"""

import json
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from ..probe.compat.names import DEFAULT_STORE, HASH_STORE, PREFIX_STORE, need

PREFIX = "fsdp2-guard"
KEPT = 6, 4096  # comparisons that a rank leaves at least, and all ranks together: rank 0 may lag
_POLLS = (0.02, 1.0)  # seconds between looks, at first and at most
DETAILS = "details"  # the question of rank 0: the sketches of a step, tensor by tensor
ASKING = 5.0  # seconds after a comparison in which rank 0 may ask it
_SECONDS = 20.0  # that rank 0 waits for ranks that are late

Post = dict[str, Any]


class Exchange:
    """The store, as one rank uses it. Alone, without a process group, it keeps its own texts."""

    def __init__(self) -> None:
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank()
        self.world = 1 if alone else dist.get_world_size()
        self.sent = 0  # bytes that this rank has left
        self.calls = 0  # of the store
        store = need(HASH_STORE)() if alone else need(DEFAULT_STORE)()
        self._store = need(PREFIX_STORE)(PREFIX, store)
        self._left: list[str] = []

    def leave(self, kind: str, step: int, post: Post) -> None:
        """Leave this rank's part of a comparison."""
        text = zlib.compress(json.dumps(post).encode(), 1)
        key = _key(kind, step, self.rank)
        self._store.set(key, text)
        self.sent, self.calls = self.sent + len(text), self.calls + 1
        self._left.append(key)
        while len(self._left) > max(KEPT[0], KEPT[1] // self.world):
            self._store.delete_key(self._left.pop(0))
            self.calls += 1

    def collect(
        self, kind: str, step: int, hurry: Callable[[], bool], seconds: float = _SECONDS
    ) -> dict[int, Post]:
        """What all ranks have left for a comparison; without those that are late.

        `hurry` says whether something else waits.
        """
        pause, longest = _POLLS
        keys = [_key(kind, step, rank) for rank in range(self.world)]
        until = time.monotonic() + seconds
        while not self._there(keys) and time.monotonic() < until:
            if hurry():
                until = min(until, time.monotonic() + 2.0)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return self._read(keys)

    def ask(self, what: str, value: str) -> None:
        """Set a word that all ranks can look for."""
        self._store.set(what, value)
        self.calls += 1

    def asked(self, what: str) -> str:
        """The word that was set, "" if there is none."""
        self.calls += 1
        if not self._store.check([what]):
            return ""
        return bytes(self._store.get(what)).decode()

    def _there(self, keys: list[str]) -> bool:
        self.calls += 1
        return bool(self._store.check(keys))

    def _read(self, keys: list[str]) -> dict[int, Post]:
        if not self._there(keys):
            ranks: Iterable[int] = [r for r, key in enumerate(keys) if self._there([key])]
        else:
            ranks = range(len(keys))
        wanted = [keys[rank] for rank in ranks]
        texts = self._store.multi_get(wanted) if wanted else []
        self.calls += 1
        return {
            rank: json.loads(zlib.decompress(bytes(text)))
            for rank, text in zip(ranks, texts, strict=True)
        }


def _key(kind: str, step: int, rank: int) -> str:
    return f"{kind}/{step}/{rank}"
