"""`accelerate estimate-memory` beside `fsdp2 plan`: its own arithmetic, on the model that it would
load from the Hub.

`python benchmarks/plan/estimate.py`, in an environment with accelerate and transformers, stores GiB
of Llama 2 7B in benchmarks/results/plan_trackers.json. The command asks the Hub for every model,
even with a local folder: where the Hub cannot be reached its error is stored too, and the model is
made from its configuration instead.
"""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import accelerate
import torch
from accelerate import init_empty_weights
from accelerate.commands import estimate
from transformers import AutoModel, LlamaConfig

sys.path.append(str(Path(__file__).parents[1]))  # for results_file

from results_file import write

RESULT = Path(__file__).parents[1] / "results" / "plan_trackers.json"
MODEL, RANKS, GIB = "meta-llama/Llama-2-7b-hf", 8, 1 << 30


def said() -> str:
    """The last line of the command."""
    words = ["estimate-memory", MODEL, "--library_name", "transformers", "--dtypes", "float32"]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", *words],
        capture_output=True,
        text=True,
    )
    return (done.stdout + done.stderr).strip().rpartition("\n")[2]


def made(*args: object, **options: object) -> torch.nn.Module:
    """As `create_empty_model` of accelerate makes it, without the Hub."""
    with init_empty_weights():
        return AutoModel.from_config(LlamaConfig(vocab_size=32000), dtype=torch.float32)


def main() -> None:
    row = {
        "name": "accelerate estimate-memory, Llama 2 7B",
        "accelerate": accelerate.__version__,
        "command": said(),
    }
    estimate.create_empty_model = made
    asked = Namespace(
        model_name=MODEL, library_name="transformers", trust_remote_code=False, dtypes=["float32"]
    )
    ((_, _, _, training),) = estimate.gather_data(asked)
    whole = max(training.values()) / GIB
    row |= {"whole_gib": round(whole, 2), "by_ranks_gib": round(whole / RANKS, 2)}
    rows = [one for one in json.loads(RESULT.read_text())["rows"] if one["name"] != row["name"]]
    print(row)
    write(RESULT, {"rows": [*rows, row]})


if __name__ == "__main__":
    main()
