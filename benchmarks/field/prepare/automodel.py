"""The tiny model and data of chat.py, and a recipe of NeMo Automodel for them.

python automodel.py FOLDER
"""

import sys
from pathlib import Path

import chat

CONFIG = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler:
  global_batch_size: 8
  local_batch_size: 2
  ckpt_every_steps: 1000
  val_every_steps: 1000
  num_epochs: 1
  max_steps: 8
dist_env:
  backend: nccl
  timeout_minutes: 2
rng:
  _target_: nemo_automodel.components.training.rng.StatefulRNG
  seed: 1111
  ranked: true
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: {folder}/model
  attn_implementation: sdpa
  use_liger_kernel: false
checkpoint:
  enabled: true
  checkpoint_dir: {folder}/out
  model_save_format: safetensors
  save_consolidated: false
distributed:
  strategy: fsdp2
  dp_size: none
  tp_size: 1
  cp_size: 1
  sequence_parallel: false
loss_fn:
  _target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy
dataset:
  _target_: nemo_automodel.components.datasets.llm.ChatDataset
  path_or_dataset_id: {folder}/chat.jsonl
  tokenizer:
    _target_: transformers.AutoTokenizer.from_pretrained
    pretrained_model_name_or_path: {folder}/model
packed_sequence:
  packed_sequence_size: 0
dataloader:
  _target_: torchdata.stateful_dataloader.StatefulDataLoader
  collate_fn: nemo_automodel.components.datasets.utils.default_collater
  shuffle: true
optimizer:
  _target_: torch.optim.AdamW
  lr: 1.0e-3
  weight_decay: 0.01
lr_scheduler:
  lr_decay_style: cosine
  min_lr: 1.0e-5
"""


def main(folder: Path) -> None:
    """Write everything below `folder`."""
    chat.main(folder)
    (folder / "tiny.yaml").write_text(CONFIG.format(folder=folder), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
