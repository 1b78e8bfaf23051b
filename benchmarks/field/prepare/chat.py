"""A tiny Qwen3 with its tokenizer, and conversations in the format of OpenAI.

    python chat.py FOLDER

FOLDER/model, chat.jsonl and chat.parquet ("messages"), text.jsonl ("text").
"""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WHO = (
    "The cat",
    "A small dog",
    "My old friend",
    "The red bird",
    "Nobody",
    "Her brother",
    "The tall man",
    "A child",
)
DOES = ("found", "lost", "painted", "carried", "hid", "sold", "dreamed of", "wrote about")
WHAT = (
    "a round stone",
    "the last apple",
    "an empty box",
    "two keys",
    "the blue door",
    "a long letter",
    "some bread",
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if"
    " message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{%"
    " endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{%"
    " endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def sentences(draw: random.Random, count: int) -> str:
    """Some sentences."""
    return " ".join(
        f"{draw.choice(WHO)} {draw.choice(DOES)} {draw.choice(WHAT)}." for _ in range(count)
    )


def conversation(draw: random.Random) -> list[dict[str, str]]:
    """A question and an answer, of different lengths."""
    user, assistant = sentences(draw, 1), sentences(draw, draw.randint(1, 4))
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def main(folder: Path, examples: int = 200) -> None:
    """Write everything below `folder`."""
    draw = random.Random(0)
    chats = [{"messages": conversation(draw)} for _ in range(examples)]
    texts = [{"text": sentences(draw, 8)} for _ in range(examples)]

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=SPECIAL, initial_alphabet=alphabet)
    bpe.train_from_iterator([row["text"] for row in texts], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT
    )
    tokenizer.save_pretrained(folder / "model")

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    special = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=384, **sizes, **heads, **special)).save_pretrained(
        folder / "model"
    )

    for name, rows in {"chat": chats, "text": texts}.items():
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    try:
        import pandas
    except ImportError:
        return
    pandas.DataFrame(chats).to_parquet(folder / "chat.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
