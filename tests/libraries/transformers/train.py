"""transformers.Trainer with FSDP2 (through accelerate): bf16, accumulation, clipping, checkpoints
of its own.

save: --out {checkpoint} --save-after 3
resume: --out {checkpoint} --resume
"""

import argparse
import logging
import os

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCAB, SEQ = 32, 16


class Sequences(Dataset):
    """The next token is 5 * token + 3 plus one random bit, modulo the vocabulary; `uneven` leaves
    out some targets.
    """

    def __init__(self, samples, uneven):
        gen = torch.Generator().manual_seed(0)
        tokens = [torch.randint(0, VOCAB, (samples,), generator=gen)]
        for _ in range(SEQ - 1):
            tokens.append(
                (5 * tokens[-1] + 3 + torch.randint(0, 2, (samples,), generator=gen)) % VOCAB
            )
        self.tokens = torch.stack(tokens, dim=1)
        self.labels = self.tokens.clone()
        if uneven:
            for sample, start in enumerate(
                torch.randint(1, SEQ, (samples,), generator=gen).tolist()
            ):
                self.labels[sample, start:] = -100

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--global-batch", type=int, default=8, help="samples of a micro-batch over all ranks"
    )
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--uneven", action="store_true")
    parser.add_argument(
        "--no-average", action="store_true", help="average_tokens_across_devices=False"
    )
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--lora-dropout", type=float, default=0.0)
    parser.add_argument("--load-dtype", default="float32")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--state", default="SHARDED_STATE_DICT")
    parser.add_argument("--efficient", action="store_true")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument(
        "--own-checkpointing",
        action="store_true",
        help="transformers' own activation checkpointing",
    )
    parser.add_argument("--optimizer", default="adamw_torch")
    parser.add_argument("--out", default="out")
    parser.add_argument("--save-after", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.WARNING)

    world = int(os.environ.get("WORLD_SIZE", 1))
    settings = TrainingArguments(
        output_dir=args.out,
        use_cpu=True,
        seed=0,
        max_steps=12,
        per_device_train_batch_size=args.global_batch // world,
        gradient_accumulation_steps=args.accumulation,
        average_tokens_across_devices=not args.no_average,
        learning_rate=3e-3,
        max_grad_norm=1.0,
        optim=args.optimizer,
        gradient_checkpointing=args.own_checkpointing,
        bf16=args.precision == "bf16",
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": args.state,
            "cpu_ram_efficient_loading": args.efficient,
            "activation_checkpointing": args.activation_checkpointing,
        },
        save_strategy="steps" if args.save_after else "no",
        save_steps=args.save_after or 500,
        save_total_limit=1,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=SEQ,
        tie_word_embeddings=args.tied,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, args.load_dtype))
    if args.lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=4, lora_alpha=8, lora_dropout=args.lora_dropout, target_modules=["q_proj", "v_proj"]
        )
        model = get_peft_model(model, adapters)
    trainer = Trainer(model=model, args=settings, train_dataset=Sequences(512, args.uneven))
    last = f"{args.out}/checkpoint-3" if args.resume else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
