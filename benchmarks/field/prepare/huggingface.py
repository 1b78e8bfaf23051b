"""A tiny Llama with its tokenizer, and a data set of short stories under the name that examples
load from the hub.

    python huggingface.py FOLDER

Run the trainer in FOLDER: `load_dataset("roneneldan/TinyStories")` then finds the folder of that
name. FIELD_ROWS in the environment is the number of stories.
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
WHEN = (
    "in the morning",
    "before the rain",
    "after school",
    "at night",
    "without a word",
    "near the river",
)
CHAT = (
    "{% for message in messages %}{{ '<s>' + message['role'] + ': ' + message['content'] + '</s>'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant: ' }}{% endif %}"
)


def story(draw: random.Random) -> str:
    """Some sentences."""
    return " ".join(
        f"{draw.choice(WHO)} {draw.choice(DOES)} {draw.choice(WHAT)} {draw.choice(WHEN)}."
        for _ in range(6)
    )


def write(folder: Path) -> None:
    """Write everything below `folder`."""
    draw = random.Random(0)
    stories = [story(draw) for _ in range(int(os.environ.get("FIELD_ROWS", "400")))]

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
    bpe.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    bpe.train_from_iterator(stories, trainers.BpeTrainer(vocab_size=300, special_tokens=special))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=CHAT,
    )
    tokenizer.save_pretrained(folder / "tiny-llama")

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "max_position_embeddings": 128,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer), **sizes, **heads, bos_token_id=0, eos_token_id=1, pad_token_id=1
    )
    LlamaForCausalLM(config).save_pretrained(folder / "tiny-llama")

    data = folder / "roneneldan" / "TinyStories"
    data.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"text": text}) for text in stories]
    (data / "train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
