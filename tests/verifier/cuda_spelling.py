"""Scripts of the zoo, spelled for GPUs by a mechanical substitution."""

import re

_WORDS = {'"gloo"': '"nccl"', '"cpu"': '"cuda"', "torch.Generator()": 'torch.Generator("cuda")'}
_BEGUN = re.compile(r"^( *)(?:torch\.)?(?:distributed|dist)\.init_process_group\(.*\)$", re.MULTILINE)
_DEVICE = 'torch.cuda.set_device(int(__import__("os").environ["LOCAL_RANK"]))\n{0}torch.set_default_device("cuda")\n{0}'


def for_gpus(text: str) -> str:
    """The script with NCCL, and CUDA for its meshes and tensors."""
    for old, new in _WORDS.items():
        text = text.replace(old, new)
    begun = _BEGUN.search(text)
    assert begun is not None, "no process group is started"
    return text[: begun.start(1)] + begun[1] + _DEVICE.format(begun[1]) + text[begun.start() + len(begun[1]) :]
