"""Scripts that do what a training script should not: one right script with a few lines more, and
names of files that are no names.
"""

from __future__ import annotations

TRAIN = """\
import argparse, json, os, signal, subprocess, sys, threading, time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

# BEFORE


def files(suffix):
    "Files of the verifier that this rank has open."
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [Path(link) for link in links if link.endswith(suffix)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", type=Path)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    done = torch.zeros(1, dtype=torch.int64)
    if options.resume and options.resume.exists():
        found, state = get_state_dict(model, optimizer)
        dcp.load({"model": found, "optimizer": state, "done": done}, checkpoint_id=options.resume)
        set_state_dict(model, optimizer, model_state_dict=found, optim_state_dict=state)
    data, target = torch.randn(64, 8), torch.randn(64, 4)
    for step in range(int(done), 20):
        # STEP
        rows = slice(step % 4 * 16 + rank * (16 // world), step % 4 * 16 + (rank + 1) * (16 // world))
        loss = nn.functional.mse_loss(model(data[rows]), target[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if options.out and step == 1:
            done.fill_(step + 1)
            found, state = get_state_dict(model, optimizer)
            dcp.save({"model": found, "optimizer": state, "done": done}, checkpoint_id=options.out)
            # SAVED
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
SAVING = ("--save-args", "--out {checkpoint}/one", "--resume-args", "--resume {checkpoint}/one")

# name: where the lines go, the lines
HOSTILE: dict[str, tuple[str, str]] = {
    "nothing at all": ("BEFORE", ""),
    "prints 200 MB": ("STEP", "if step == 0: [sys.stdout.write('x' * 2**20 + '\\n') for _ in range(200)]"),
    "prints every byte": ("STEP", "sys.stdout.buffer.write(bytes(range(256)) * 999); sys.stderr.buffer.write(bytes(range(256)) * 999)"),
    "moves the cursor": ("STEP", "print('\\x1b]0;x\\x07\\x1b[2J\\x1b[?1049h\\x1b[31m\\x9b', file=sys.stderr)"),
    "forges a verdict": ("BEFORE", "print('verdict: pass\\n0 fail', flush=True); print('verdict: pass', file=sys.stderr); sys.exit(0)"),
    "forges a report": ("BEFORE", "print(json.dumps({'schema': 1, 'verdict': 'pass', 'findings': []}), flush=True); os._exit(0)"),
    "commands a CI system": ("STEP", "print('\\n::error::x\\n##[error]x\\n::stop-commands::y\\n##vso[task.complete]', flush=True)"),
    "raises hostile text": ("STEP", "raise RuntimeError('</script>]]>\\x00\\ud800\\x1b[31m](x)\\n::error::x\\n##[error]x' + 'y' * 10**7)"),
    "raises what has no text": (
        "STEP",
        "\n".join(["class Bad(Exception):", "    def __str__(self): raise self", "raise Bad()"]),
    ),
    "raises no Exception": ("STEP", "raise type('Odd', (BaseException,), {})('x')"),
    "interrupts itself": ("STEP", "raise KeyboardInterrupt"),
    "exits with a megabyte": ("STEP", "sys.exit('z' * 2**20)"),
    "exits with an object": ("STEP", "sys.exit(object())"),
    "leaves at once": ("STEP", "os._exit(0)"),
    "aborts": ("STEP", "os.abort()"),
    "stops itself": ("STEP", "os.kill(os.getpid(), signal.SIGSTOP)"),
    "reads nowhere": ("STEP", "import ctypes; ctypes.string_at(0)"),
    "recurses without end": ("STEP", "sys.setrecursionlimit(10**6); f = lambda: f(); f()"),
    "hangs and ignores SIGTERM": ("STEP", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile step == 2: time.sleep(1)"),
    "hangs in native code": ("STEP", "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\nwhile True: pass"),
    "writes into its trace": ("STEP", "[file.open('a').write('{\"kind\": \"end\"}\\n') for file in files('.jsonl')]"),
    "writes nonsense into its trace": ("STEP", "[file.open('ab').write(bytes(range(256))) for file in files('.jsonl')]"),
    "cuts its trace": ("STEP", "[os.truncate(file, 100) for file in files('.jsonl')]"),
    "makes its trace a folder": ("STEP", "[(file.unlink(), file.mkdir()) for file in files('.jsonl') if file.is_file()]"),
    "makes its trace a pipe": ("STEP", "[(file.unlink(), os.mkfifo(file)) for file in files('.jsonl') if file.is_file()]"),
    "makes its trace endless": ("STEP", "[(file.unlink(), file.symlink_to('/dev/zero')) for file in files('.jsonl') if file.is_file()]"),
    "writes into its progress": ("STEP", "[file.open('a').write('+5\\n7 x\\n+{\\n') for file in files('.progress')]; 1 / 0"),
    "leaves files like the verifier's": ("STEP", "[(file.parent / 'rank7.jsonl').write_text('x') for file in files('.jsonl')]"),
    "removes its run": ("STEP", "import shutil; [shutil.rmtree(file.parent, ignore_errors=True) for file in files('.jsonl')[:1]]"),
    "removes everything": ("STEP", "import shutil; [shutil.rmtree(file.parents[1], ignore_errors=True) for file in files('.jsonl')[:1]]"),
    "removes its checkpoint": ("SAVED", "import shutil; dist.barrier(); shutil.rmtree(options.out.parent, ignore_errors=True)"),
    "makes its checkpoint a file": (
        "SAVED",
        "import shutil; dist.barrier(); shutil.rmtree(options.out.parent, ignore_errors=True)\n"
        "if rank == 0: options.out.parent.write_text('x')",
    ),
    "makes its checkpoint a link": (
        "SAVED",
        "dist.barrier()\n"
        "if rank == 0: options.out.parent.rename(str(options.out.parent) + '.x'); options.out.parent.symlink_to('/usr/bin')",
    ),
    "leaves a pipe in its checkpoint": ("SAVED", "rank or os.path.lexists(options.out / 'p') or os.mkfifo(options.out / 'p')"),
    "leaves a link to nowhere": ("SAVED", "rank or os.path.lexists(options.out / 'p') or (options.out / 'p').symlink_to('nowhere')"),
    "leaves a link to itself": ("SAVED", "rank or os.path.lexists(options.out / 'p') or (options.out / 'p').symlink_to('p')"),
    "leaves a name that is no text": ("SAVED", "open(os.fsencode(options.out) + b'/\\xff\\n::', 'w').close()"),
    "empties its checkpoint": ("SAVED", "dist.barrier(); [os.truncate(file, 0) for file in options.out.iterdir()]"),
    "starts a daemon": ("STEP", "subprocess.Popen(['sleep', '600'], start_new_session=True)"),
    "starts an orphan": ("STEP", "subprocess.run(['sh', '-c', '(trap \"\" TERM HUP; sleep 600) & exit 0'])"),
    "leaves a thread": ("STEP", "threading.Thread(target=time.sleep, args=(600,)).start()"),
    "ends the manager": ("STEP", "step == 1 and rank == 0 and os.kill(os.getppid(), signal.SIGKILL)"),
    "ends the launcher": (
        "STEP",
        "above = lambda pid: int(Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])\n"
        "step == 1 and rank == 0 and os.kill(above(os.getppid()), signal.SIGKILL)",
    ),
    "removes its own source": ("STEP", "os.path.exists(__file__) and rank == 0 and os.unlink(__file__)"),
    "rewrites its own source": ("STEP", "open(__file__, 'wb').write(b'def (\\xff')"),
    "closes every file": ("STEP", "os.closerange(0, 256)"),
    "has no stdout": ("BEFORE", "sys.stdout = sys.stderr = None"),
    "has an odd stdout": ("BEFORE", "sys.stdout = sys.stderr = object()"),
    "breaks json": ("STEP", "json.dumps = lambda *a, **k: 'x'"),
    "breaks time": ("STEP", "time.monotonic = lambda: 'now'"),
    "clears its environment": ("STEP", "os.environ.clear(); sys.modules.pop('torch')"),
    "may open no file": ("STEP", "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))"),
    "may write no file": ("STEP", "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"),
    "has no memory": ("STEP", "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**20, 2**20)); bytearray(2**26)"),
    "is elsewhere": ("STEP", "import tempfile; d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d)"),
}  # fmt: skip
SIMULATED = [name for name in HOSTILE if "checkpoint" not in name and "the " not in name][::2]
NAMES = (
    b"a\nb.py",
    b"a'b.py",
    b'a"b.py',
    b"a::b.py",
    b"<script>.py",
    b"\xff\xfe.py",
    b"a b.py",
    b"{checkpoint}.py",
    b"%s$(x)`y`.py",
    b"##[error]a,b.py",
)


def hostile(name: str) -> str:
    """The script with the lines of this name in it."""
    where, lines = HOSTILE[name]
    before, _, after = TRAIN.partition(f"# {where}\n")
    indent = before.rpartition("\n")[2]
    return before + f"\n{indent}".join(lines.splitlines()) + "\n" + after
