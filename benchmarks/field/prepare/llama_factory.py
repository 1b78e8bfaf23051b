"""The tiny model and data of chat.py, and a configuration of LLaMA-Factory v1 for full fine-tuning
with FSDP2.

python llama_factory.py FOLDER
"""

import json
import sys
from pathlib import Path

import torchvision_without_cuda

DATA = """\
tiny:
  path: {folder}/alpaca.json
  source: local
  converter: alpaca
"""
CONFIG = """\
model: {folder}/model
model_class: llm
dist_config:
  name: fsdp2
  dcp_path: null
train_dataset: {folder}/data.yaml
output_dir: {folder}/out
micro_batch_size: 2
global_batch_size: 8
cutoff_len: 64
learning_rate: 1.0e-3
batching_workers: 0
max_steps: 8
"""


def main(folder: Path) -> None:
    """Write everything below `folder`."""
    torchvision_without_cuda.main(folder)
    import chat

    chat.main(folder)
    chats = [
        json.loads(line)["messages"]
        for line in (folder / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    rows = [
        {"instruction": ask["content"], "input": "", "output": answer["content"]}
        for ask, answer in chats
    ]
    (folder / "alpaca.json").write_text(json.dumps(rows), encoding="utf-8")
    for name, text in {"data": DATA, "tiny": CONFIG}.items():
        (folder / f"{name}.yaml").write_text(text.format(folder=folder), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
