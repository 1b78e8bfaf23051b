"""Whose code a frame is: by where libraries really are, never by a part of a name."""

import json.decoder
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.fsdp

from records import cases, run
from scripts import python
from verified_fsdp2.verifier import pipeline
from verified_fsdp2.verifier.analysis.root_cause import own_frames, root_cause
from verified_fsdp2.verifier.probe.frames import Frames
from verified_fsdp2.verifier.trace import Ended, origin

TORCH = torch.distributed.fsdp.__file__


@cases(
    "file",
    "/home/me/verifier/train.py",
    "/home/me/torch/distributed/train.py",
    "/home/me/skill/train.py",
    "/home/me/lib/python/train.py",
    "/home/me/site-packages-of-mine/train.py",
    "/srv/torch",
    "train.py",
    str(Path(__file__).parents[1] / "zoo" / "minimal.py"),
)
def test_users_code(file: str) -> None:
    assert origin.origin(file) == "user"
    assert origin.is_user(file) and not origin.is_machinery(file)


@cases(
    "file, whose",
    (TORCH, "torch"),
    ("/opt/other/lib/python3.12/site-packages/torch/optim/adamw.py", "torch"),
    ("/usr/lib/python3/dist-packages/torch/optim/adamw.py", "torch"),
    (pytest.__file__, "library"),
    (f"{Path(torch.__file__).parent}_extras/train.py", "library"),
    ("/opt/other/lib/python3.12/site-packages/peft/model.py", "library"),
    (json.decoder.__file__, "python"),
    ("<frozen importlib._bootstrap>", "python"),
    ("<string>", "python"),
    (pipeline.__file__, "verifier"),
)
def test_code_of_others(file: str, whose: str) -> None:
    assert origin.origin(file) == whose
    assert not origin.is_user(file)
    assert origin.is_machinery(file) is (whose != "library")


def test_a_path_below_torch_is_known_without_an_import_of_it() -> None:
    assert origin.within_torch(TORCH) == "distributed/fsdp/__init__.py"
    assert origin.within_torch("/home/me/torch/distributed/fsdp/__init__.py") == ""
    words = (
        "import sys; from verified_fsdp2.verifier.trace.origin import origin; origin('/x.py');"
        " assert 'torch' not in sys.modules"
    )
    python("-c", words)


DUMP = """Current thread 0x1 (most recent call first):
  File "{torch}", line 1 in all_reduce
  File "{own}", line 7 in main
"""


def test_a_users_folder_called_torch_or_verifier_is_blamed() -> None:
    for own in ("/home/me/torch/distributed/train.py", "/home/me/verifier/train.py"):
        frames, waits = own_frames(DUMP.format(torch=TORCH, own=own))
        assert ([f.file for f in frames], waits) == ([own], True)
        busy = f'Current thread 0x1 (most recent call first):\n  File "{own}", line 9 in load\n'
        killed = (Ended(0, -9, True), Ended(1, -9, True))
        found = root_cause(
            replace(
                run([], []),
                ended=killed,
                timed_out=True,
                stacks={0: DUMP.format(torch=TORCH, own=own), 1: busy},
            )
        )
        assert (found.rank, found.location.file, found.location.line) == (1, own, 9)


def test_frames_of_a_project_in_a_folder_called_verifier(tmp_path: Path) -> None:
    folder = tmp_path / "verifier" / "site-packages-of-mine"
    folder.mkdir(parents=True)
    script = folder / "train.py"
    script.write_text("def main(frames):\n    return frames.here()\n")
    space: dict[str, object] = {}
    exec(compile(script.read_text(), str(script), "exec"), space)
    place = space["main"](Frames(str(folder)))  # type: ignore[operator]
    assert (place.file, place.line, place.function) == (str(script), 2, "main")


def test_the_line_of_a_library_to_which_the_users_line_led(tmp_path: Path) -> None:
    library, script = tmp_path / "site-packages" / "trainer.py", tmp_path / "mine" / "train.py"
    library.parent.mkdir()
    script.parent.mkdir()
    library.write_text("def step(look):\n    return look()\n")
    script.write_text("def main(step, look):\n    return step(look)\n")
    space: dict[str, object] = {}
    for file in (library, script):
        exec(compile(file.read_text(), str(file), "exec"), space)
    frames = Frames(str(script.parent))
    for look in (frames.here, lambda: frames.stack()[0]):
        place = space["main"](space["step"], look)  # type: ignore[operator]
        assert (place.file, place.line, place.function) == (str(script), 2, "main")
    place = space["main"](space["step"], frames.here)  # type: ignore[operator]
    assert (place.library.file, place.library.line, place.library.function) == (
        str(library),
        2,
        "step",
    )
    assert place.through == []
    plain = replace(place, library=None)
    assert place == plain
    assert hash(place) == hash(plain)


def test_one_line_of_each_library_on_the_way() -> None:
    texts = {
        "inner": "def back(look, more):\n    return more(back, look) if more else look()\n",
        "outer": (
            "def step(back, look):\n    return back(look, again)\ndef again(back, look):\n   "
            " return back(look, None)\n"
        ),
        "train": "def main(step, back, look):\n    return step(back, look)\n",
    }
    space: dict[str, Any] = {}
    for name, text in texts.items():
        exec(
            compile(
                text,
                f"/mine/{name}.py" if name == "train" else f"/env/site-packages/{name}.py",
                "exec",
            ),
            space,
        )
    frames = Frames("/mine")
    for place in (
        space["main"](space["step"], space["back"], frames.here),
        space["main"](space["step"], space["back"], frames.stack)[0],
    ):
        lines = [(Path(line.file).stem, line.line) for line in (place.library, *place.through)]
        assert lines == [("inner", 2), ("outer", 4)]
        assert place.callers == []


def test_one_line_of_each_file_that_led_here() -> None:
    texts = {
        "saving": "def save(look):\n    return look()\n",
        "loop": (
            "def run(save, look):\n    return again(save, look)\ndef again(save, look):\n    return"
            " save(look)\n"
        ),
        "train": "def main(run, save, look):\n    return run(save, look)\n",
    }
    space: dict[str, Any] = {}
    for name, text in texts.items():
        exec(compile(text, f"/mine/{name}.py", "exec"), space)
    place = space["main"](space["run"], space["save"], Frames("/mine").here)
    assert [(Path(line.file).stem, line.line) for line in (place, *place.callers)] == [
        ("saving", 2),
        ("loop", 4),
        ("train", 2),
    ]
