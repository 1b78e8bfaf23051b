# ruff: noqa: PTH105, PTH108, PTH109, PTH123, PTH211
"""Ways to write or delete by libraries, threads and other processes, and in the home folder."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

from acts import Job, Place, standard, way


@way("torch-save")
def _(job: Job) -> None:
    import torch

    torch.save({"step": 1}, job.folder / "ckpt_100.pt")


@way("torch-save-thread")
def _(job: Job) -> None:
    import torch

    one = threading.Thread(target=torch.save, args=({"step": 1}, job.folder / "ckpt_100.pt"))
    one.start()
    one.join()


def _save(path: str) -> None:
    import torch

    torch.save({"step": 1}, path)


@way("torch-save-spawn")
def _(job: Job) -> None:
    path = str((job.folder / "ckpt_100.pt").absolute())
    one = multiprocessing.get_context("spawn").Process(target=_save, args=(path,))
    one.start()
    one.join()
    if one.exitcode:
        raise RuntimeError(f"the child ended with {one.exitcode}")


@way("from-file-shared")
def _(job: Job) -> None:
    import torch

    view = torch.from_file(str(job.folder / "ckpt_100.pt"), shared=True, size=64, dtype=torch.uint8)
    view.fill_(7)


@way("memmap")
def _(job: Job) -> None:
    import numpy

    view = numpy.memmap(job.folder / "ckpt_100.pt", dtype="uint8", mode="r+")
    view[:64] = 7
    view.flush()


@way("safetensors")
def _(job: Job) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(3)}, job.folder / "ckpt_100.pt")
    save_file({"weight": torch.ones(3)}, job.folder / "new.safetensors")


@way("parquet")
def _(job: Job) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"x": [1, 2]}), str(job.folder / "ckpt_100.pt"))


def _old_checkpoint(folder: Path, place: Place) -> None:
    (folder / "checkpoint").mkdir()
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (folder / "checkpoint" / name).write_bytes(b"of a real training " * 100)


def _state(job: Job) -> dict[str, object]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return {"model": get_model_state_dict(job.model)}


@way("dcp-save", _old_checkpoint, everyone=True)
def _(job: Job) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(_state(job), checkpoint_id=str(job.folder / "checkpoint"))


@way("dcp-async-save", _old_checkpoint, everyone=True)
def _(job: Job) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.async_save(_state(job), checkpoint_id=str(job.folder / "checkpoint")).result()


@way("tensorboard")
def _(job: Job) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(job.folder / "runs")) as writer:
        writer.add_scalar("loss", 1.0, 1)


def _tracked(folder: Path, place: Place) -> None:
    run = folder / "wandb" / "offline-run-1"
    (run / "files").mkdir(parents=True)
    (run / "run-1.wandb").write_bytes(b"old")
    (folder / "wandb" / "latest-run").symlink_to("offline-run-1")
    (folder / "wandb" / "debug.log").symlink_to("offline-run-1/files/debug.log")


@way("wandb-layout", _tracked)
def _(job: Job) -> None:
    """What wandb does offline: a folder for each run, and a link to the last one."""
    top = job.folder / "wandb"
    run = top / f"offline-run-{os.getpid()}"
    (run / "files").mkdir(parents=True)
    (run / "run.wandb").write_bytes(b"new")
    os.symlink(run.name, top / "latest-run.new")
    os.replace(top / "latest-run.new", top / "latest-run")
    os.unlink(top / "debug.log")
    os.symlink(f"{run.name}/files/debug.log", top / "debug.log")
    (top / "debug.log").write_text("through a link whose target did not exist")


@way("hydra-layout")
def _(job: Job) -> None:
    """What hydra does: a folder with the date, which becomes the working folder."""
    here = os.getcwd()
    out = job.folder / "outputs" / "2026-01-01" / "12-00-00"
    (out / ".hydra").mkdir(parents=True)
    os.chdir(out)
    try:
        with open(".hydra/config.yaml", "w") as file:
            file.write("lr: 0.1\n")
        with open("train.log", "a") as file:
            file.write("step 1\n")
    finally:
        os.chdir(here)


def _importable(folder: Path, place: Place) -> None:
    (folder / "helper_of_ways.py").write_text("VALUE = 1\n")


@way("pycache", _importable, owns=("work/project/__pycache__",))
def _(job: Job) -> None:
    sys.path.insert(0, str(job.folder.absolute()))
    import helper_of_ways  # noqa: F401

    sys.path.pop(0)


@way("child-rm")
def _(job: Job) -> None:
    folder = job.folder
    subprocess.run(["rm", "-rf", folder / "folder", folder / "file.txt"], check=True)


@way("child-mv")
def _(job: Job) -> None:
    subprocess.run(["mv", job.folder / "file.txt", job.folder / "moved.txt"], check=True)


@way("child-redirect")
def _(job: Job) -> None:
    command = "echo new > file.txt; echo new > new.txt"
    subprocess.run(command, shell=True, cwd=job.folder, check=True)


@way("os-system")
def _(job: Job) -> None:
    if os.system(f"cp {job.folder}/ckpt_100.pt {job.folder}/file.txt"):
        raise RuntimeError("cp failed")


_CHILD = """
import os, sys
os.chdir(sys.argv[1])
open("file.txt", "w").write("new")
open("new.txt", "w").write("new")
os.unlink("ckpt_100.pt")
"""


@way("child-python")
def _(job: Job) -> None:
    subprocess.run([sys.executable, "-c", _CHILD, str(job.folder)], check=True)


@way("child-python-isolated")
def _(job: Job) -> None:
    """Without site, user site and variables of Python, and with an empty environment."""
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(job.folder)]
    subprocess.run(command, env={}, check=True)


@way("child-late", alone=True)
def _(job: Job) -> None:
    """A child that is not waited for, writes for three seconds, and has left the session."""
    script = "for i in 1 2 3 4 5 6; do echo $i >> file.txt; sleep 0.5; done; echo end > new.txt"
    subprocess.Popen(["sh", "-c", script], cwd=job.folder, start_new_session=True)


@way("fork")
def _(job: Job) -> None:
    child = os.fork()
    if not child:
        try:
            with open(job.folder / "file.txt", "w") as file:
                file.write("new")
            os.unlink(job.folder / "ckpt_100.pt")
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _repository(folder: Path, place: Place) -> None:
    (folder / "config.yaml").write_text("lr: 0.1\n")
    (folder / "notes.txt").write_text("main\n")
    _git(place.project, "init", "-q", "-b", "main")
    _git(place.project, "add", folder.name)
    _git(place.project, "commit", "-qm", "main")
    _git(place.project, "checkout", "-qb", "other")
    (folder / "config.yaml").write_text("lr: 0.2\n")
    (folder / "more.txt").write_text("other\n")
    _git(place.project, "add", folder.name)
    _git(place.project, "commit", "-qm", "other")
    _git(place.project, "checkout", "-q", "main")


def _git(folder: Path | str, *words: str) -> None:
    who = ["-c", "user.name=trial", "-c", "user.email=trial@example.org", "-c", "gc.auto=0"]
    command = ["git", "-c", "safe.directory=*", *who, *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@way("git-checkout", _repository, owns=("work/project/.git",))
def _(job: Job) -> None:
    _git(".", "checkout", "-q", "other")


def _cached(folder: Path, place: Place) -> None:
    hub = place.home / ".cache" / "torch" / "hub" / "checkpoints"
    hub.mkdir(parents=True)
    (hub / "net.pth").write_bytes(b"downloaded")
    (place.home / ".cache" / "somelib").mkdir()
    (place.home / ".cache" / "somelib" / "index.json").write_text("{}")


@way("home-cache", _cached, owns=("home/.cache",), alone=True)
def _(job: Job) -> None:
    import torch

    hub = Path(torch.hub.get_dir(), "checkpoints")
    (hub / "net.pth").write_bytes(b"downloaded again")
    (hub / "new.pth").write_bytes(b"downloaded")
    somelib = Path.home() / ".cache" / "somelib"
    (somelib / "index.json").write_text('{"x": 1}')
    (somelib / "x").write_text("new")


def _dotfile(folder: Path, place: Place) -> None:
    standard(folder, place)
    (place.home / ".somerc").write_text("token = old\n")


@way("home-dotfile", _dotfile, owns=("home/.somerc",), alone=True)
def _(job: Job) -> None:
    (Path.home() / ".somerc").write_text("token = new\n")


@way("home-dotfile-child", _dotfile, owns=("home/.somerc",), alone=True)
def _(job: Job) -> None:
    subprocess.run("echo new > ~/.somerc; rm file.txt", shell=True, cwd=job.folder, check=True)
