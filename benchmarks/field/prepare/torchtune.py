"""A tiny Llama 2 checkpoint, a sentencepiece tokenizer, texts, and the recipe's configuration with
their paths and sizes.

python torchtune.py FOLDER
"""

import json
import sys
from pathlib import Path

import sentencepiece
from huggingface import write

CONFIG = """\
output_dir: {folder}/out
tokenizer:
  _component_: torchtune.models.llama2.llama2_tokenizer
  path: {folder}/tokenizer.model
  max_seq_len: 32
dataset:
  _component_: torchtune.datasets.text_completion_dataset
  source: json
  data_files: {folder}/roneneldan/TinyStories/train.jsonl
  column: text
  split: train
seed: 0
shuffle: True
model:
  _component_: torchtune.models.llama2.llama2
  vocab_size: 196
  num_layers: 2
  num_heads: 4
  num_kv_heads: 4
  embed_dim: 32
  intermediate_dim: 64
  max_seq_len: 128
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: {folder}/tiny-llama
  checkpoint_files: [model.safetensors]
  recipe_checkpoint: recipe_state.pt
  output_dir: ${{output_dir}}
  model_type: LLAMA2
resume_from_checkpoint: False
save_every_n_steps: null
batch_size: 2
epochs: 1
max_steps_per_epoch: 12
gradient_accumulation_steps: 1
optimizer:
  _component_: torch.optim.AdamW
  lr: 1e-3
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
clip_grad_norm: 1.0
compile: False
optimizer_in_bwd: False
device: cuda
dtype: fp32
enable_activation_checkpointing: True
enable_activation_offloading: False
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${{output_dir}}/logs
log_every_n_steps: 1
log_peak_memory_stats: True
log_level: INFO
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
"""


def main(folder: Path) -> None:
    """Write everything below `folder`."""
    write(folder)
    rows = (
        (folder / "roneneldan" / "TinyStories" / "train.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([json.loads(row)["text"] for row in rows]),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=150,
        model_type="bpe",
        minloglevel=2,
    )
    (folder / "tiny.yaml").write_text(CONFIG.format(folder=folder), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
