"""Scripts of the corpus in the spelling of GPUs: NCCL, a device for each rank, CUDA for meshes,
tensors and generators.
"""

from __future__ import annotations

import re

WORDS = {'"gloo"': '"nccl"', '"cpu"': '"cuda"', "torch.Generator()": 'torch.Generator("cuda")'}
BEGUN = re.compile(
    r"^( *)(?:torch\.)?(?:distributed|dist)\.init_process_group\(.*\)$", re.MULTILINE
)
DEVICE = (
    'torch.cuda.set_device(int(__import__("os").environ["LOCAL_RANK"]))\n'
    '{0}torch.set_default_device("cuda")\n{0}'
)
RESPELLED = (
    *(
        "minimal",
        "mixed_precision",
        "gradient_accumulation",
        "fp16_scaler",
        "autocast",
        "activation_checkpointing",
    ),
    *(
        "tied_embeddings",
        "manual_global_clip",
        "dict_output",
        "ema",
        "checkpoint_functions",
        "hsdp",
    ),
)  # right scripts of tests/zoo/ that need no other change


def for_gpus(text: str) -> str:
    """The script with NCCL, and CUDA for its meshes and tensors.

    Raises ValueError where no line begins a process group.
    """
    for old, new in WORDS.items():
        text = text.replace(old, new)
    if (begun := BEGUN.search(text)) is None:
        raise ValueError("no line calls init_process_group")
    return (
        text[: begun.start(1)]
        + begun[1]
        + DEVICE.format(begun[1])
        + text[begun.start() + len(begun[1]) :]
    )
