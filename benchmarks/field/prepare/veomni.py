"""The tiny model and data of chat.py, and a configuration for `tasks/train_text.py` without
kernels.

python veomni.py FOLDER
"""

import sys
from pathlib import Path

import torchvision_without_cuda

CONFIG = """\
model:
  config_path: {folder}/model
  tokenizer_path: {folder}/model
  ops_implementation:
    attn_implementation: sdpa
    moe_implementation: eager
    cross_entropy_loss_implementation: eager
    rms_norm_implementation: eager
    swiglu_mlp_implementation: eager
    rotary_pos_emb_implementation: eager
    load_balancing_loss_implementation: eager
data:
  train_path: {folder}/chat.jsonl
  data_type: conversation
  chat_template: chatml
  max_seq_len: 64
  train_size: 100000
  train_sample: 200
  dataloader:
    num_workers: 0
    prefetch_factor: null
train:
  dyn_bsz: false
  accelerator:
    fsdp_config:
      fsdp_mode: fsdp2
      mixed_precision:
        enable: true
  gradient_checkpointing:
    enable: true
  global_batch_size: 8
  micro_batch_size: 2
  optimizer:
    lr: 1.0e-3
    lr_decay_style: cosine
    max_grad_norm: 1.0
  num_train_epochs: 1
  max_steps: 12
  init_device: meta
  checkpoint:
    output_dir: {folder}/out
    save_steps: 0
    save_epochs: 0
    save_hf_weights: false
  wandb:
    enable: false
"""


def main(folder: Path) -> None:
    """Write everything below `folder`."""
    torchvision_without_cuda.main(folder)
    import chat

    chat.main(folder)
    (folder / "tiny.yaml").write_text(CONFIG.format(folder=folder), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
