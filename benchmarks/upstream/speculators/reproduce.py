"""Save and resume a run of speculators' Trainer; print what the resumed run does otherwise.

On CPU, by gloo, on two ranks, FSDP2 (`fsdp_shard=True`), with AdamW and the linear schedule:

torchrun --nproc-per-node 2 reproduce.py CHECKOUT_OF_SPECULATORS
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig

sys.path.insert(0, str(Path(sys.argv[1], "src")))
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train import distributed
from speculators.train.trainer import Trainer, TrainerConfig

STEPS, SAVED = 400, 257  # steps of the epoch, the step after which the checkpoint is written

# What maybe_setup_distributed() does; it asks for an accelerator.
dist.init_process_group("gloo")
distributed._is_distributed, distributed._rank = True, dist.get_rank()
distributed._world_size = dist.get_world_size()


def make_trainer(folder, resume):
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
    )
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=1)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=llama,
        draft_vocab_size=64,
        norm_before_residual=False,
        embed_requires_grad=False,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
    )
    model = Eagle3DraftModel(config)
    for weights in (model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm):
        torch.nn.init.ones_(weights.weight)  # in a training these come from the verifier
    settings = TrainerConfig(
        lr=1e-3, num_epochs=1, save_path=folder, resume_from_checkpoint=resume, fsdp_shard=True
    )
    return Trainer(model, settings, train_loader=range(STEPS))


def step(trainer):
    """A step as in train_epoch, but for the gradient, here that of sum(w ** 2) / 2."""
    for parameter in trainer.model.parameters():
        parameter.grad = parameter.detach().clone() if parameter.requires_grad else None
    trainer._optimizers_step()
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    trainer._schedulers_step()
    trainer.global_step += 1
    return rate


def tensors(trainer):
    """Whole copies of the trained weights and of the optimizer's state."""
    (optimizer,) = trainer.optimizers
    weights, states = {}, {}
    for name, weight in trainer.model.named_parameters():
        if weight.requires_grad:
            weights[name] = weight.full_tensor().detach().clone()
            for key, value in optimizer.state[weight].items():
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                states[name, key] = value.detach().clone()
    return weights, states


folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
trainer = make_trainer(folder[0], resume=False)
for _ in range(SAVED):
    step(trainer)
trainer.maybe_save_checkpoint(0, local_step=SAVED)
saved = tensors(trainer)
resumed = make_trainer(folder[0], resume=True)
loaded = tensors(resumed)
rates = [(step(trainer), step(resumed)) for _ in range(3)]

if dist.get_rank() == 0:
    for number, (before, after) in enumerate(rates, SAVED + 1):
        print(f"step {number}: learning rate {before:.4e} uninterrupted, {after:.4e} resumed")
    for kind, old, new in zip(("weights", "optimizer state"), saved, loaded, strict=True):
        changed = [key for key in old if not torch.equal(old[key], new[key])]
        rounded = [key for key in old if torch.equal(old[key].bfloat16().float(), new[key])]
        types = {str(value.dtype) for value in old.values()}
        print(
            f"{kind} ({', '.join(types)}): {len(changed)} of {len(old)} tensors changed by save"
            f" and load, {len(rounded)} of {len(old)} equal to their bfloat16 rounding"
        )
    key = next(key for key in saved[1] if key[1] == "step")
    print(f"AdamW's step: {saved[1][key]:.0f} saved, {loaded[1][key]:.0f} loaded")
dist.destroy_process_group()
