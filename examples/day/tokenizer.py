"""A tokenizer for a run of a day: learned from the standard library, with a chat template.

python tokenizer.py tokenizer    # needs: pip install transformers
"""

import sys
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = """\
{% for message in messages %}<|start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}\
{% else %}{{ message.content }}<|end|>{% endif %}{{ '\\n' }}{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
marks, every_byte = ["<|end|>", "<|start|>"], pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(
    vocab_size=1024, special_tokens=marks, initial_alphabet=every_byte, show_progress=False
)
tokenizer.train(sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("*.py"))), trainer)
of_transformers = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
)
of_transformers.save_pretrained(sys.argv[1])
