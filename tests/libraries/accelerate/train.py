"""A small Llama trained with accelerate's FSDP2 plugin: bf16 compute, accumulation, clipping,
save_state and load_state.

resume: --resume {checkpoint}
save: --save {checkpoint} --save-after 3
"""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, SEQ = 32, 16


class Sequences(Dataset):
    """The next token is 5 * token + 3 plus one random bit, modulo the vocabulary."""

    def __init__(self, samples):
        gen = torch.Generator().manual_seed(0)
        tokens = [torch.randint(0, VOCAB, (samples,), generator=gen)]
        for _ in range(SEQ - 1):
            tokens.append(
                (5 * tokens[-1] + 3 + torch.randint(0, 2, (samples,), generator=gen)) % VOCAB
            )
        self.tokens = torch.stack(tokens, dim=1)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--batch", type=int, default=8, help="samples of a micro-batch over all ranks"
    )
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--load-dtype", default="float32")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--full", action="store_true", help="checkpoints of full state dicts")
    parser.add_argument(
        "--efficient",
        action="store_true",
        help="only rank 0 holds the weights before they are sharded",
    )
    parser.add_argument("--buffer", action="store_true", help="a buffer that is in the state dict")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument(
        "--own-checkpointing",
        action="store_true",
        help="transformers' own activation checkpointing",
    )
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--save")
    parser.add_argument("--save-after", type=int, default=0)
    parser.add_argument("--resume")
    args = parser.parse_args()

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="FULL_STATE_DICT" if args.full else "SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=args.efficient,
        activation_checkpointing=args.activation_checkpointing,
    )
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        mixed_precision=args.precision,
        gradient_accumulation_steps=args.accumulation,
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
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
        attention_dropout=args.dropout,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, args.load_dtype))
    if args.buffer:
        model.register_buffer("seen", torch.zeros(1))
    model.train()
    if args.own_checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=3e-3)
    loader = DataLoader(Sequences(512), batch_size=args.batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    if args.resume:
        accelerator.load_state(args.resume)
        done = args.save_after or 3
    batches = accelerator.skip_first_batches(loader, done * args.accumulation)
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            done += 1
            accelerator.print(
                f"step {done} loss {accelerator.gather(loss.detach()).mean().item():.4f}"
            )
            if args.save and done == args.save_after:
                accelerator.save_state(args.save)
        if done == 12:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
