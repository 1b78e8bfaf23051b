"""Phasic policy gradient: policy, value and auxiliary phases with an optimizer each."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from nets import PolicyNet, ValueNet
from phases import auxiliary_phase, policy_phase, value_phase
from rollout import ACT, OBS, collect


class Momenta:
    """State of the plain optimizers as a flat dictionary: one entry for each parameter that has been stepped."""

    def __init__(self, opts):
        self.opts = opts

    def flat(self, fill=False):
        out = {}
        for name, opt in self.opts.items():
            for i, p in enumerate(opt.param_groups[0]["params"]):
                if fill:
                    opt.state[p]["momentum_buffer"] = torch.zeros_like(p)
                if opt.state.get(p, {}).get("momentum_buffer") is not None:
                    out[f"{name}.{i}"] = opt.state[p]["momentum_buffer"]
        return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=6)
    ap.add_argument("--aux-every", type=int, default=2)
    ap.add_argument("--target-kl", type=float, default=0.02)
    ap.add_argument("--save-after", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(70)
    policy, value = PolicyNet(OBS, ACT), ValueNet(OBS)
    for net in (policy, value):
        fully_shard(net)
    main_params = [p for n, p in policy.named_parameters() if not n.startswith("aux_value")]
    opts = {"policy": torch.optim.SGD(main_params, lr=0.05, momentum=0.5),
            "value": torch.optim.SGD(value.parameters(), lr=0.05, momentum=0.5),
            "aux": torch.optim.SGD([p for n, p in policy.named_parameters() if n != "log_std"], lr=0.03, momentum=0.5)}
    momenta, first = Momenta(opts), 0
    if args.resume:
        state = {"policy": get_model_state_dict(policy), "value": get_model_state_dict(value), "momenta": momenta.flat(fill=True), "iteration": 0}
        dcp.load(state, checkpoint_id=args.resume)
        set_model_state_dict(policy, state["policy"])
        set_model_state_dict(value, state["value"])
        first = state["iteration"]

    memory = []
    for it in range(first, args.iterations):
        batch, reward = collect(policy, value, it)
        memory.append(batch)
        epochs = policy_phase(policy, opts["policy"], batch, 4, args.target_kl)
        vloss = value_phase(value, opts["value"], batch, 3)
        line = f"iteration {it + 1} loss {-reward:.4f} policy epochs {epochs} value loss {vloss:.4f}"
        if (it + 1) % args.aux_every == 0:
            line += f" aux loss {auxiliary_phase(policy, opts['aux'], memory, 2):.4f}"
            memory = []
        if rank == 0:
            print(line, flush=True)
        if args.save_after == it + 1:   # to be taken after an auxiliary phase, when the memory is empty
            assert not memory
            dcp.save({"policy": get_model_state_dict(policy), "value": get_model_state_dict(value), "momenta": momenta.flat(),
                      "iteration": it + 1}, checkpoint_id=args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
