"""A run's own world: what is written in it does not reach the files outside, by each mechanism that
this machine has.
"""

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from records import cases
from scripts import ZOO, wait_until, written
from trees import build_file_tree
from verified_fsdp2.verifier.config.target import resolve
from verified_fsdp2.verifier.errors import MachineRefuses, starving
from verified_fsdp2.verifier.isolation import (
    leftovers,
    mirror,
    mounts,
    refusal,
    seccomp,
    write_supervisor,
)
from verified_fsdp2.verifier.isolation.choose import Choice, Trial, Wish, in_words, must_isolate
from verified_fsdp2.verifier.isolation.enter import enter
from verified_fsdp2.verifier.isolation.inside import in_world
from verified_fsdp2.verifier.isolation.world import DENIED, World
from verified_fsdp2.verifier.isolation.worlds import Worlds, caches, wish
from verified_fsdp2.verifier.launch.client import Launcher
from verified_fsdp2.verifier.pipeline import select, verify, verify_with

Act = Callable[[Path], object]
DIGEST = "mtime_ns mode size target"


def digest(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every path below a folder, with its content, times, mode and link target."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        about = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        target = os.readlink(path) if path.is_symlink() else ""
        found[str(path)] = (
            about.st_mode,
            about.st_mtime_ns,
            about.st_nlink,
            about.st_ino,
            content,
            target,
        )
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with what people have beside a script."""
    folder = tmp_path / "home" / "project"
    files = {
        "data.txt": "data\n",
        "old/ckpt_100.pt": "weights",
        "old/deep/x": "x",
        ".state/last.json": "{}",
    }
    build_file_tree(folder, files)
    (folder / "latest.pt").symlink_to("old/ckpt_100.pt")
    os.link(folder / "old/ckpt_100.pt", folder / "best.pt")
    (folder / "large.bin").write_bytes(b"x" * (mirror.SMALL + 1))
    build_file_tree(tmp_path / "home" / "runs", {"x.csv": "1,2\n"})
    return folder


def connected(folder: Path) -> None:
    """A script's database."""
    with sqlite3.connect(folder / "runs.db") as base:
        base.execute("create table if not exists run (loss real)")
    base.close()


def folders(folder: Path) -> None:
    (folder / "old/deep").rename(folder / "moved")
    shutil.rmtree(folder / "old")
    (folder / "old").mkdir()
    assert not list((folder / "old").iterdir()) and (folder / "moved/x").read_text() == "x"


def large(folder: Path) -> None:
    with (folder / "large.bin").open("r+b") as file:
        file.write(b"y")
    assert (folder / "large.bin").read_bytes()[:2] == b"yx"


def below(folder: Path) -> None:
    subprocess.run(
        ["sh", "-c", "rm best.pt; mv data.txt other.txt; echo x > latest.pt"],
        cwd=folder,
        check=True,
    )


WAYS: dict[str, Act] = {
    "open": lambda folder: (folder / "data.txt").write_text("other"),
    "append": lambda folder: (folder / "data.txt").open("a").write("more"),
    "link": lambda folder: (folder / "latest.pt").write_text("other"),
    "hard link": lambda folder: (folder / "best.pt").write_text("other"),
    "hidden": lambda folder: (folder / ".state/last.json").write_text("other"),
    "beside": lambda folder: (folder / "../runs/x.csv").write_text("other"),
    "large": large,
    "mode": lambda folder: (
        (folder / "data.txt").chmod(0o600),
        os.utime(folder / "large.bin", (1, 1)),
    ),
    "unlink": lambda folder: (folder / "latest.pt").unlink(),
    "folders": folders,
    "sqlite": connected,
    "child": below,
    "new": lambda folder: build_file_tree(folder, {"new/a/b.txt": "x"}),
    "fifo": lambda folder: os.mkfifo(folder / "pipe"),
    "made link": lambda folder: os.link(folder / "data.txt", folder / "second"),
}


def done(files: Worlds, folder: Path, act: Act, state: str = "scratch") -> World:
    """Do something in a world of its own; it must succeed there."""
    folder.mkdir(parents=True)
    world = files.begin(folder, state)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            enter(world, str(folder))
            in_world(world.as_dict())
            os.chdir(world.inside(str(files.cwd)))
            act(Path(world.inside(str(files.project))))
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return world


@pytest.fixture(params=["overlay", "copy"])
def files(request: pytest.FixtureRequest, project: Path, tmp_path: Path) -> Iterator[Worlds]:
    """Worlds of a project by a mechanism."""
    trial = Trial(Wish(request.param, str(tmp_path / "work"), (str(project),)))
    choice = trial.choice()
    if choice.mechanism != request.param:
        pytest.skip(in_words({"mechanism": choice.mechanism, "reasons": choice.reasons}))
    yield Worlds(
        tmp_path / "work", [project], project, choice, environ={"HOME": str(project.parent)}
    )
    trial.end()


@cases("way", *WAYS)
def test_nothing_of_the_users_changes(
    way: str, files: Worlds, project: Path, tmp_path: Path
) -> None:
    before = digest(project.parent)
    world = done(files, tmp_path / "work/01", WAYS[way])
    assert digest(project.parent) == before
    assert not (tmp_path / "work/01" / DENIED).exists()
    files.end(world, (), keeps=False, leaves=False)
    assert not Path(world.folder).exists()


def test_a_run_finds_what_an_earlier_one_has_kept(
    files: Worlds, project: Path, tmp_path: Path
) -> None:
    def first(folder: Path) -> None:
        build_file_tree(folder, {"data.txt": "trained", "runs/step_4/model.pt": "w"})
        (folder / "latest.pt").unlink()
        shutil.rmtree(folder / "old")
        folder.joinpath("old").mkdir()

    def second(folder: Path) -> None:
        assert (folder / "data.txt").read_text() == "trained"
        assert (folder / "runs/step_4/model.pt").read_text() == "w"
        assert not list((folder / "old").iterdir()) and not os.path.lexists(folder / "latest.pt")
        shutil.rmtree(folder / "runs")

    before = digest(project.parent)
    wrote = files.end(
        done(files, tmp_path / "work/01", first, "empty"), (), keeps=True, leaves=False
    )
    assert {str(project / "data.txt"), str(project / "runs")} <= {*wrote}
    for name in ("02", "03"):  # the second does not find what the first of them has removed
        done(files, tmp_path / "work" / name, second, "saved")
    done(files, tmp_path / "work/04", lambda folder: (folder / "latest.pt").read_text())
    assert digest(project.parent) == before and files.notes()


def test_a_socket_of_the_users_can_be_reached(files: Worlds, project: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(project / "s"))
        server.listen(1)

        def call(folder: Path) -> None:
            with socket.socket(socket.AF_UNIX) as client:
                client.connect("s")  # a path of at most 108 bytes

        done(files, tmp_path / "work/01", call)


def test_shared_memory_ends_with_the_run(files: Worlds, tmp_path: Path) -> None:
    name = f"/dev/shm/fsdp2-test-{os.getpid()}"
    done(files, tmp_path / "work/01", lambda folder: Path(name).write_text("left"))
    assert not os.path.exists(name)


def test_libraries_keep_what_they_cache_for_all_runs(project: Path, tmp_path: Path) -> None:
    environ = {
        "HOME": str(project.parent),
        "HF_HOME": str(tmp_path / "hub"),
        "TMPDIR": str(tmp_path),
    }
    found = [path for path, _ in caches(tmp_path / "work", environ)]
    assert {f"{project.parent}/.cache", f"{project.parent}/.triton", str(tmp_path / "hub")} <= {
        *found
    }
    assert caches(tmp_path / "work", {**environ, "XDG_CACHE_HOME": str(project.parent)})[0][
        0
    ] != str(project.parent)


def stopped(act: Act, folder: Path, allowed: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the supervisor records of a write; {} if it lets it happen."""
    (folder / "run").mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            world = World("guard", str(folder / "run"), str(folder / "run"), "", allowed=allowed)
            write_supervisor.supervised(write_supervisor.Paths(world), str(folder / "run"))
            act(folder)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    file = folder / "run" / DENIED
    return dict(json.loads(file.read_text())) if file.exists() else {}


STOPPED: dict[str, tuple[Act, str]] = {
    "open": (lambda folder: (folder / "data.txt").write_text("x"), "data.txt"),
    "new": (lambda folder: (folder / "new").touch(), "new"),
    "append": (lambda folder: (folder / "data.txt").open("a"), "data.txt"),
    "link": (lambda folder: (folder / "latest.pt").write_text("x"), "old/ckpt_100.pt"),
    "unlink": (lambda folder: (folder / "data.txt").unlink(), "data.txt"),
    "rename": (lambda folder: (folder / "old").rename(folder / "x"), "old"),
    "over": (lambda folder: os.replace(_own(folder), folder / "data.txt"), "data.txt"),
    "mkdir": (lambda folder: (folder / "x").mkdir(), "x"),
    "chmod": (lambda folder: (folder / "data.txt").chmod(0o600), "data.txt"),
    "fchmod": (
        lambda folder: os.fchmod(os.open(folder / "data.txt", os.O_RDONLY), 0o600),
        "data.txt",
    ),
    "utime": (lambda folder: os.utime(folder / "data.txt"), "data.txt"),
    "truncate": (lambda folder: os.truncate(folder / "data.txt", 1), "data.txt"),
    "symlink": (lambda folder: (folder / "x").symlink_to("data.txt"), "x"),
    "made link": (lambda folder: os.link(folder / "data.txt", folder / "run/x"), "data.txt"),
    "descriptor": (
        lambda folder: os.unlink("data.txt", dir_fd=os.open(folder, os.O_RDONLY)),
        "data.txt",
    ),
    "child": (
        lambda folder: subprocess.run(["rm", str(folder / "data.txt")], check=False),
        "data.txt",
    ),
    "relative": (
        lambda folder: (os.chdir(folder / "old"), Path("../data.txt").write_text("x")),
        "data.txt",
    ),
}
LET: dict[str, Act] = {
    "own": lambda folder: _own(folder),
    "read": lambda folder: (folder / "data.txt").read_text(),
    "made before": lambda folder: (folder / "old").mkdir(exist_ok=True),
    "null": lambda folder: Path("/dev/null").write_text("x"),
    "removed": lambda folder: (folder / "no such").unlink(missing_ok=True),
    "bytecode": lambda folder: subprocess.run(
        [sys.executable, "-c", "import a"], cwd=folder, check=True
    ),
}


def _own(folder: Path) -> Path:
    (folder / "run/x").write_text("x")
    return folder / "run/x"


@cases("way", *STOPPED)
def test_a_write_is_stopped_before_it_happens(way: str, project: Path) -> None:
    (project / "run").mkdir()
    act, path = STOPPED[way]
    before = digest(project / "old"), (project / "data.txt").lstat()
    found = stopped(act, project)
    assert found["path"] == str(project / path) and not found["in_rank"]
    assert bool(found["command"]) and found.get("size", 0) == (
        0 if path in ("new", "x") else found["size"]
    )
    after = digest(project / "old"), (project / "data.txt").lstat()
    assert before[0] == after[0] and before[1].st_ctime_ns == after[1].st_ctime_ns


@cases("way", *LET)
def test_what_is_let_happen(way: str, project: Path) -> None:
    written(project, "x = 1\n", "a.py")
    assert stopped(LET[way], project) == {}
    assert not (project / "__pycache__").exists()


def test_where_a_run_may_write(project: Path) -> None:
    act = STOPPED["open"][0]
    assert stopped(act, project, (str(project / "old"),))["path"] == str(project / "data.txt")
    (project / "run" / DENIED).unlink()
    assert stopped(act, project, (str(project / "data.txt"),)) == {}
    assert (project / "data.txt").read_text() == "x"


def test_the_message_on_a_stopped_write(project: Path) -> None:
    world = World("copy", "/w", "/w/01", "", roots=(str(project),))
    found = {
        "path": "/w/01/mirror/data/a b.pt",
        "size": 3 << 30,
        "call": "openat",
        "command": [],
        "in_rank": True,
    }
    (project / DENIED).write_text(json.dumps(found))
    stacks = {
        0: (
            f'  File "/usr/lib/python3/x.py", line 1 in a\n  File "/w/01/mirror{project}/train.py",'
            " line 7 in save\n"
        )
    }
    said = refusal.refusal(project, world, stacks, [("/w/01/mirror", "")])
    for part in (
        "/data/a b.pt (now 3 GiB)",
        f"at {project}/train.py:7 in save",
        "--allow-writes '/data/a b.pt'",
    ):
        assert part in said
    (project / DENIED).write_text(json.dumps({"path": "/w/x", "error": errno.ENOSPC}))
    assert "no space left" in refusal.refusal(
        project, world, {}
    ) and refusal.ELSEWHERE in said + refusal.refusal(project, world, {})
    assert refusal.refusal(project / "old", world, {}) == ""


def test_where_paths_are_meant_in_the_copy() -> None:
    world = World(
        "copy",
        "/w",
        "/w/01",
        "/w/01/files/checkpoint",
        mirror="/w/01/mirror",
        roots=("/home/u", "/home/u/p"),
    )
    assert world.inside("/home/u/p/a") == "/w/01/mirror/home/u/p/a"
    assert [world.inside(path) for path in ("/home/u2/a", "/w/x", "/home")] == [
        "/home/u2/a",
        "/w/x",
        "/home",
    ]
    assert world.inside_words("--data=/home/u/p:/data") == "--data=/w/01/mirror/home/u/p:/data"
    assert World.of(json.loads(json.dumps(world.as_dict()))) == world


MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
23 22 0:5 / /proc ro,relatime - proc proc rw
30 22 0:9 / /tmp ro,nosuid shared:3 - tmpfs tmp rw
31 22 0:9 / /tmp rw,nosuid shared:3 - tmpfs tmp rw
32 22 0:9 / /no\\040such rw - ext4 x rw
"""


def test_mounts_are_read() -> None:
    found = mounts.mounts(MOUNTS)
    assert [(one.path, one.kind, one.read_only) for one in found] == [
        ("/", "ext4", False),
        ("/proc", "proc", True),
        ("/tmp", "tmpfs", False),
    ]
    assert (
        mounts.is_below("/a/b", "/a")
        and mounts.is_below("/a", "/")
        and not mounts.is_below("/ab", "/a")
    )


def test_a_copy_is_made_as_far_as_it_is_small(project: Path, tmp_path: Path) -> None:
    for number in range(3):
        build_file_tree(project / f"many{number}", {f"{name}.txt": "x" for name in range(900)})
    (project / "venv").mkdir()
    (project / "venv/pyvenv.cfg").touch()
    root = str(tmp_path / "root")
    mirror.build(root, (str(project.parent),), str(project), str(tmp_path / "work"))
    copy = Path(root + str(project))
    assert (
        not (copy / "data.txt").is_symlink()
        and os.readlink(copy / "latest.pt") == "old/ckpt_100.pt"
    )
    linked = [name for name in ("large.bin", ".state", "venv") if (copy / name).is_symlink()]
    assert linked[-2:] == [".state", "venv"]  # a file system may clone the large file
    assert (
        sum(1 for path in copy.rglob("*.txt") if path.is_symlink()) + 2000
        > 2700
        > len(list(copy.rglob("*.txt"))) / 2
    )
    assert mirror.changed(root, str(project)) == []
    (copy / "new").mkdir()
    (copy / "data.txt").write_text("other")
    assert mirror.changed(root, str(project)) == [str(project / "data.txt"), str(project / "new")]


def test_temporary_folders_of_ended_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import os, signal; from verified_fsdp2.verifier.isolation.leftovers import temporary\n"
    code += (
        "place = temporary('verify'); (place / 'deep').mkdir(0o000); print(place); import sys;"
        " sys.stdout.flush()\n"
    )
    code += "os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    left = Path(killed.stdout.strip())
    assert killed.returncode == -signal.SIGKILL and left.is_dir()
    build_file_tree(tmp_path, {"fsdp2-other-x/keep": "", "fsdp2-error-x.log": ""})
    mine = leftovers.temporary("verify")
    assert not left.exists() and sorted(path.name for path in tmp_path.iterdir())[:2] == [
        "fsdp2-error-x.log",
        "fsdp2-other-x",
    ]
    assert leftovers.clean(tmp_path) == [] and mine.is_dir()
    leftovers.remove(mine)
    assert not mine.exists()


def test_without_isolation_nothing_runs() -> None:
    with pytest.raises(MachineRefuses, match="--isolation none"):
        must_isolate(Choice("none", {"overlay": "no", "copy": "no"}), "auto")
    must_isolate(Choice("none"), "none")
    must_isolate(Choice("copy"), "auto")


def test_every_call_is_answered_once() -> None:
    names = [call.name for call in seccomp.CALLS]
    assert len({*names}) == len(names)
    for machine in ("x86_64", "aarch64"):
        numbers = [number for call in seccomp.CALLS if (number := getattr(call, machine))]
        assert len({*numbers}) == len(numbers)
    assert len(seccomp.program()) % 8 == 0


@pytest.mark.launch
@cases("mechanism", "overlay", "copy", "guard")
def test_a_checkpoint_comes_back_by_each_mechanism(
    mechanism: str, project: Path, tmp_path: Path
) -> None:
    written(project, (ZOO / "checkpoint_stateful.py").read_text(encoding="utf-8"))
    before = digest(project.parent)
    flags = {
        "save_args": "--save-every 3 --out {checkpoint}",
        "resume_args": "--resume {checkpoint}",
        "reshard_to": "",
    }
    target = resolve(project / "train.py", {**flags, "steps": 5})
    with Launcher(wish=wish(tmp_path / "work", project, mechanism=mechanism)) as launcher:
        if launcher.choice.mechanism != mechanism:
            pytest.skip(in_words({"mechanism": "none", "reasons": launcher.choice.reasons}))
        verdict = verify_with(
            launcher, target, tmp_path / "work", select(("run-completes", "resume-is-exact"), ())
        )
    assert {finding.status for finding in verdict.findings} == {"pass"}, verdict.findings
    assert verdict.environment["isolation"] == mechanism and digest(project.parent) == before


def test_a_lock_is_not_held_by_children(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    leftovers.lock(tmp_path / "a")
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        os.close(leftovers._locks.pop(tmp_path / "a"))
        with (tmp_path / "a" / leftovers.LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        child.kill()
        child.wait()
    wait_until(1, lambda: child.returncode is not None)


def test_shared_memory_of_others_is_no_place_to_write(project: Path) -> None:
    theirs = Path(f"/dev/shm/fsdp2-theirs-{os.getpid()}")
    theirs.write_text("data")
    try:
        found = stopped(lambda folder: theirs.write_text("other"), project)
        assert found["path"] == str(theirs) and theirs.read_text() == "data"
        (project / "run" / DENIED).unlink()
        theirs.unlink()
        theirs.mkdir()
        assert stopped(lambda folder: (theirs / "new").touch(), project)["path"] == str(
            theirs / "new"
        )
    finally:
        shutil.rmtree(theirs)


@cases(
    "path, own",
    ("/home/u/a", True),
    ("/net/b", False),
    ("/net/u/a", True),
    ("/dev/null", True),
    ("/mnt/x", False),
)
def test_which_places_of_an_overlay_are_guarded(path: str, own: bool) -> None:
    places = {"/home": True, "/net": False, "/net/u": True, "/mnt": False}
    assert write_supervisor.Paths(World("overlay", "/w", "/w/1", ""), places).own(path) == own


def test_a_trial_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(caches: object) -> None:
        raise OSError(errno.ENOSPC, "not allowed here", "unshare")

    monkeypatch.setattr("verified_fsdp2.verifier.isolation.overlay.begin", refused)
    trial = Trial(Wish("auto", str(tmp_path), (str(tmp_path),)))
    choice = trial.choice()
    assert (
        choice.mechanism != "overlay" and choice.reasons["overlay"] == "not allowed here (unshare)"
    )
    trial.end()
    assert Trial(Wish("overlay", str(tmp_path))).choice().mechanism == "none"


@cases(
    "text, said",
    ("RuntimeError: can't start new thread", "process"),
    ("OpenBLAS error: Memory allocation still failed after 10 retries", "memory"),
    ("ValueError: x", ""),
)
def test_what_a_machine_refuses_is_named(text: str, said: str) -> None:
    assert said in starving(text) and bool(said) == bool(starving(text))


@pytest.mark.launch
@cases("mechanism", "overlay", "copy")
def test_a_checkpoint_comes_back_after_a_preparation(
    mechanism: str, project: Path, tmp_path: Path
) -> None:
    written(project, (ZOO / "checkpoint_stateful.py").read_text(encoding="utf-8"))
    written(project, "open('made.txt', 'w').write('x')\n", "make.py")
    flags = {
        "save_args": "--save-every 3 --out {checkpoint}",
        "resume_args": "--resume {checkpoint}",
        "reshard_to": "",
    }
    target = resolve(
        project / "train.py",
        {**flags, "steps": 5, "prepare": str(project / "make.py"), "isolation": mechanism},
    )
    verdict = verify(target, tmp_path / "work", ("run-completes", "resume-is-exact"))
    assert {finding.status for finding in verdict.findings} == {"pass"}, verdict.findings
    assert not (project / "made.txt").exists()


def test_what_the_kernel_refuses_by_itself_stops_no_run(project: Path) -> None:
    def tries(folder: Path) -> None:
        for call in (
            lambda: os.rename(folder / "no such", folder / "run/x"),
            lambda: os.chmod(folder / "no such", 0o600),
            lambda: os.truncate(folder / "no such", 0),
            lambda: (folder / "data.txt/below").write_text("x"),
        ):
            with pytest.raises(OSError, match=r"No such file|Not a directory"):
                call()
        (folder / "run/done").touch()

    assert stopped(tries, project) == {} and (project / "run/done").exists()


def test_a_project_in_a_cache_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = [path for path, _ in wish(tmp_path / "work", tmp_path / ".cache" / "project").caches]
    assert f"{tmp_path}/.cache" not in paths and f"{tmp_path}/.triton" in paths
