"""Models of Hugging Face transformers, there and back: local folder -> sharded on 2 ranks ->
checkpoint -> exported folder, bit by bit.

    python benchmarks/transformers_models.py --out benchmarks/results/transformers_models.json

Needs transformers, peft and safetensors. The models (Llama, Qwen 3, GPT-2; tiny, random) are made
on the spot; nothing is fetched. `full`: each rank reads its shards of the folder's safetensors;
what they hold together, their logits, and what export.py makes of their checkpoint are compared
with `from_pretrained` of the folder. `full_tp`: the same on 4 ranks with matrices split over 2.
`lora`: four steps of train.py; then the frozen weights are compared with the folder, and the logits
with those of peft, which opens the exported adapters beside the folder's model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import environment
from results_file import write
from verified_fsdp2.skill import scaffold, spec

RANKS = 2
RANK = Path(__file__).with_name("transformers_rank.py")
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LIKE_LLAMA = {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **LIKE_LLAMA, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **LIKE_LLAMA, "tie_word_embeddings": False},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 256,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
    },
}
TARGETS = {
    "llama": "[q_proj, v_proj]",
    "qwen3": "[q_proj, mlp.down_proj]",
    "gpt2": "[c_attn, mlp.c_proj]",
}
SPLIT = ("llama", "qwen3")  # transformers has a plan for them
SPEC = """
version: 1
model: {{kind: transformers, pretrained: {folder}, vocabulary: 256, sequence_length: 32}}
finetune: {finetune}
parallel: {{tp: {tp}}}
data: {{kind: text, files: ["{{stdlib}}/json/*.py"]}}
precision: {{param_dtype: float32}}
optimizer: {{lr: 0.01}}
train: {{steps: 20, global_batch: 8, micro_batch: 2}}
checkpoint: {{export: true}}
"""


def make(name: str, folder: Path) -> None:
    """A model whose norms and biases are not what a fresh one has, in several files for Llama."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**MODELS[name]), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="100KB" if name == "llama" else "1GB")


def project(folder: Path, finetune: str, out: Path, tp: int = 1) -> None:
    path = out.with_suffix(".yaml")
    path.write_text(SPEC.format(folder=folder, finetune=finetune, tp=tp), encoding="utf-8")
    scaffold.write(scaffold.render(spec.load(path)), out)


def run(*command: object, cwd: Path) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: exit {done.returncode}\n{done.stderr[-3000:]}")


def torchrun(script: object, *arguments: object, cwd: Path, ranks: int = RANKS) -> None:
    words = ("--standalone", "--nproc-per-node", ranks)
    run(sys.executable, "-m", "torch.distributed.run", *words, script, *arguments, cwd=cwd)


def full(folder: Path, place: Path, tp: int = 1) -> dict[str, Any]:
    """There and back without training."""
    import torch
    from transformers import AutoModelForCausalLM

    place = place / f"full-{tp}"
    place.mkdir()
    project(folder, "{kind: full}", place / "project", tp)
    torchrun(RANK, place / "project", folder, place / "held", cwd=place, ranks=RANKS * tp)
    checkpoint = place / "held" / "checkpoints" / "step_00000000"
    run(sys.executable, "export.py", checkpoint, place / "exported", cwd=place / "project")
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    after = AutoModelForCausalLM.from_pretrained(place / "exported").state_dict()
    same = before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    return {**json.loads((place / "held" / "reported.json").read_text()), "exported_bitwise": same}


def lora(name: str, folder: Path, place: Path) -> dict[str, Any]:
    """Four steps, then the adapters in peft."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    project(folder, f"{{kind: lora, rank: 4, targets: {TARGETS[name]}}}", place / "lora")
    torchrun("train.py", "--steps", 4, "--out", place / "runs", cwd=place / "lora")
    checkpoint = place / "runs" / "run-001" / "checkpoints" / "step_00000004"
    torchrun(RANK, place / "lora", folder, place / "trained", checkpoint, cwd=place)
    run(sys.executable, "export.py", checkpoint, place / "adapters", cwd=place / "lora")
    held = torch.load(place / "trained" / "held.pt", weights_only=True)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), str(place / "adapters")
    )
    with torch.no_grad():
        logits = model.train(False)(held["tokens"], use_cache=False).logits
    reported = json.loads((place / "trained" / "reported.json").read_text())
    size = sum(file.stat().st_size for file in checkpoint.iterdir())
    return {
        **reported,
        "peft_logits_apart": float((logits - held["logits"]).abs().max()),
        "checkpoint_bytes": size,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="fsdp2-transformers-") as folder:
        for name in MODELS:
            if options.only in name:
                place = Path(folder, name)
                place.mkdir()
                make(name, place / "model")
                rows[name] = {
                    "full": full(place / "model", place),
                    "lora": lora(name, place / "model", place),
                }
                if name in SPLIT:
                    rows[name]["full_tp"] = full(place / "model", place, tp=2)
                print(name, json.dumps(rows[name]), flush=True)
    if options.out:
        made_with = {**environment("transformers", "peft", "safetensors"), "ranks": RANKS}
        write(options.out, {"environment": made_with, "models": rows})
    return 0 if all(right(row) for row in rows.values()) else 1


def right(row: dict[str, Any]) -> bool:
    """Everything is bitwise as it was; the adapters have moved, and peft computes what training
    computed.
    """
    untrained, trained = row["full"], row["lora"]
    split = row.get("full_tp", untrained)
    parts = (untrained, trained, split)
    whole = all(
        part[f"equal_{kind}"] == part[kind] for part in parts for kind in ("parameters", "buffers")
    )
    moved = (
        trained["adapters_moved"] * 2 == trained["trained"] > 0 and trained["logits_apart"] > 0.0
    )
    return bool(
        whole
        and untrained["exported_bitwise"]
        and split["exported_bitwise"]
        and split["logits_apart"] <= 1e-5
        and untrained["logits_apart"] == 0.0
        and moved
        and trained["peft_logits_apart"] <= 1e-5
    )


if __name__ == "__main__":
    raise SystemExit(main())
