"""A run that has made its steps waits for the saves that it has begun."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from verified_fsdp2.verifier.probe.events import collective_log
from verified_fsdp2.verifier.probe.events.collective_log import Flight


def test_a_stopped_run_waits_for_its_uploads_and_not_for_ever(monkeypatch: Any) -> None:
    saves = Flight(SimpleNamespace(request=SimpleNamespace(watch_saves=False)))  # type: ignore[arg-type]
    upload: Future[None] = Future()
    saves.started(SimpleNamespace(upload_completion=upload), None)
    timer = threading.Timer(0.3, upload.set_result, [None])
    timer.start()
    saves.stopped()
    assert upload.done()
    saves.started(Future(), None)  # as torch before 2.9 returns it; it never ends
    monkeypatch.setattr(collective_log, "SAVES", 0.1)
    saves.stopped()
    timer.join()
