import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, set_model_state_dict)
from torch.distributed.fsdp import fully_shard

from nets import MixerLM, NetConfig


def shard(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def build_teacher(cfg, seed):
    torch.manual_seed(seed)
    teacher = MixerLM(cfg)
    teacher.init_weights()
    return shard(teacher)


def student_state(teacher, keep):
    """Full state dict for a student that takes every kept layer, and the rest, from the teacher."""
    full = get_model_state_dict(teacher, options=StateDictOptions(full_state_dict=True))
    state = {}
    for name, value in full.items():
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            if int(index) in keep:
                state[f"layers.{keep.index(int(index))}.{rest}"] = value.clone()
        else:
            state[name] = value.clone()
    return state


def build_student(teacher, keep, seed):
    cfg = NetConfig(**{**vars(teacher.cfg), "layers": len(keep)})
    student = shard(MixerLM(cfg, device="meta"))
    student.to_empty(device="cpu")
    torch.manual_seed(seed)
    student.init_weights()
    set_model_state_dict(student, student_state(teacher, keep),
                         options=StateDictOptions(full_state_dict=True))
    return student
