"""A run of a day on a small scale: the commands of examples/day/README.md, as a user gives them,
and what they print.

    python benchmarks/run_of_a_day.py --out benchmarks/results/run_of_a_day.json

A tokenizer is made, a small mixture of experts is trained on the standard library, stopped by
SIGTERM on 2 ranks, killed by SIGKILL on 4 and finished on 1. Then LoRA teaches it to answer, the
adapters are merged, and transformers opens what is exported. Three things are checked: each logged
step is there once with finite values, the logits of transformers are those of the model that was
trained, and the answer that the chat model gives is one that it was taught. `load` is the
machine's, over the last 15 minutes: what else it did took part of the time. `--work FOLDER` keeps
the projects.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from machine import environment
from results_file import write

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "One piece of advice on bread?"
TERMINATED, KILLED = 60, 100  # after the save of this step
LIMIT = 1e-4  # of the difference of two logits
SHOWN = re.compile(
    r"^(step +\d+00 |step +60 |saved|resume|stopped|model|mesh|end |validation|json|asyncio|loss"
    r" |error|exported|out/|\S*tokens/)"
)
PATIENCE = 3600
COMPARE = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM
sys.path.insert(0, ".")
from generate import load_model
checkpoint, exported, packed = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "packed"
tokens = torch.randint(1024, (2, 64), generator=torch.Generator().manual_seed(0))
positions = torch.arange(64).expand(2, 64)
with torch.no_grad():
    ours = load_model(checkpoint, torch.device("cpu"))(tokens, *([positions] if packed else []))
    theirs = AutoModelForCausalLM.from_pretrained(exported)(tokens).logits
name = type(AutoModelForCausalLM.from_pretrained(exported)).__name__
print(f"{name} {(ours - theirs).abs().max().item():.2e}")
"""
ANSWER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, question = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
asked = [{"role": "user", "content": question}]
asked = tokenizer.apply_chat_template(
    asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
)["input_ids"]
found = model.generate(asked, max_new_tokens=60, do_sample=False)[0, asked.shape[1] :]
print(tokenizer.decode(found, skip_special_tokens=True))
"""


class Day:
    """The commands so far, in one folder."""

    def __init__(self, work: Path) -> None:
        self.work, self.rows = work, list[dict[str, Any]]()
        bin_folder = Path(sys.executable).parent
        self.env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
        }

    def run(
        self,
        folder: str,
        command: Sequence[str],
        shown: str,
        until: Callable[[str], bool] | None = None,
        kill: int = 0,
    ) -> str:
        """What the command prints; `until` it prints a line, after which the signal is sent."""
        started, lines = time.monotonic(), list[str]()
        process = subprocess.Popen(
            command,
            cwd=self.work / folder,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if until and until(line):
                os.kill(process.pid if kill == signal.SIGTERM else a_rank(process.pid), kill)
                until = None
            if time.monotonic() - started > PATIENCE:
                process.kill()
        status = process.wait()
        if (status != 0) != bool(kill):
            raise SystemExit(f"{' '.join(command)}: exit {status}\n" + "\n".join(lines[-30:]))
        seconds = round(time.monotonic() - started, 1)
        prints = worth_showing([line.replace(f"{self.work}/", "") for line in lines])
        row = {"in": folder, "command": shown, "exit": status, "seconds": seconds, "prints": prints}
        self.rows.append(row | ({"signal": signal.Signals(kill).name} if kill else {}))
        print(f"$ {shown}   # {seconds} s", *prints, sep="\n", flush=True)
        return "\n".join(lines)

    def command(self, folder: str, words: str, **more: Any) -> str:
        first, *rest = words.split()
        return self.run(folder, [first, *rest], words, **more)


def worth_showing(lines: list[str]) -> list[str]:
    """What shows how it went; else the end."""
    printed = [
        line
        for line in lines
        if line.strip() and "it/s]" not in line and not re.match(r"W\d{4} ", line)
    ]
    return ([line for line in printed if SHOWN.match(line)] or printed[-2:])[-9:]


def a_rank(torchrun: int) -> int:
    """The last of the processes that torchrun has started."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    return int(children[-1])


def saved(step: int) -> Callable[[str], bool]:
    return lambda line: line.startswith(f"saved step_{step:08d}")


def train_twice(day: Day, steps: int) -> None:
    """Stopped, killed, finished: on 2, 4 and 1 ranks."""
    torchrun = "torchrun --standalone --nproc-per-node"
    day.command("pretrain", f"{torchrun} 2 train.py", until=saved(TERMINATED), kill=signal.SIGTERM)
    day.command(
        "pretrain", f"{torchrun} 4 train.py --resume", until=saved(KILLED), kill=signal.SIGKILL
    )
    day.command("pretrain", "python train.py --resume")
    lines = (day.work / "pretrain" / "out" / "run-001" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    assert [*losses] == [*range(10, steps + 1, 10)], losses
    assert all(math.isfinite(loss) for loss in losses.values())


def exported(day: Day, folder: str, step: int, packed: str) -> float:
    """The largest difference of the logits of transformers from those of the trained model."""
    checkpoint = f"out/run-001/checkpoints/step_{step:08d}"
    day.command(folder, f"python export.py {checkpoint} exported")
    found = day.run(
        folder,
        ["python", "-c", COMPARE, checkpoint, "exported", packed],
        "# logits: transformers beside the checkpoint",
    )
    return float(found.split()[-1])


def the_day(work: Path) -> dict[str, Any]:
    day = Day(work / "day")
    shutil.copytree(ROOT / "examples" / "day", day.work, dirs_exist_ok=True)
    shutil.copy(ROOT / "examples" / "chats.jsonl", work)  # beside it: it is named so in chat.yaml
    started = time.monotonic()
    day.command(".", "python tokenizer.py tokenizer")
    day.command(".", "fsdp2 new pretrain.yaml pretrain")
    day.command("pretrain", "python prepare.py")
    train_twice(day, 200)
    checkpoint = "out/run-001/checkpoints/step_00000200"
    day.run(
        "pretrain",
        ["python", "generate.py", checkpoint, "def __init__(self", "--tokens", "40"],
        f'python generate.py {checkpoint} "def __init__(self" --tokens 40',
    )
    apart = {"pretrain": exported(day, "pretrain", 200, "plain")}

    day.command(".", f"fsdp2 new chat.yaml chat --set train.init_from=pretrain/{checkpoint}")
    day.command("chat", "python prepare.py")
    day.command("chat", "torchrun --standalone --nproc-per-node 2 train.py")
    checkpoint = "out/run-001/checkpoints/step_00000060"
    answer = day.run(
        "chat",
        ["python", "generate.py", checkpoint, QUESTION, "--temperature", "0"],
        f'python generate.py {checkpoint} "{QUESTION}" --temperature 0',
    )
    apart["chat"] = exported(day, "chat", 60, "packed")
    again = day.run(
        "chat",
        ["python", "-c", ANSWER, "exported", QUESTION],
        "# the same question to transformers",
    )
    taught = (ROOT / "examples" / "chats.jsonl").read_text()
    checks = {
        "logits apart at most": apart,
        "answer was taught": answer.splitlines()[-1] in taught,
        "transformers answers alike": again.splitlines()[-1] == answer.splitlines()[-1],
    }
    ok = (
        max(apart.values()) < LIMIT
        and checks["answer was taught"]
        and checks["transformers answers alike"]
    )
    summary = {
        "ok": ok,
        "seconds": round(time.monotonic() - started),
        "load": round(os.getloadavg()[2], 1),
    }
    return {**summary, "checks": checks, "commands": day.rows}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write what was printed as JSON")
    parser.add_argument("--work", type=Path, help="keep the projects in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fsdp2-day-") as folder:
        results = {"environment": environment(), **the_day(options.work or Path(folder))}
    if options.out:
        write(options.out, results)
    print(json.dumps(results["checks"]))
    return 0 if results["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
