"""What is to be verified, and the runs that are made of it."""

import shlex
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Self

from ..analysis.checkpoints import named_paths, number_in
from ..analysis.steps_to_compare import steps_to_compare, trains_before_sharding
from ..config.target import Target
from ..config.windows import Window
from ..evidence import Evidence
from ..launch.planned import PlannedRun
from ..rules import RULES
from ..tolerances import FURTHER_STEPS, GRACE, LEAST
from ..trace.roles import OF_CHECKPOINTS, QUICK


@dataclass(frozen=True)
class Settings:
    """A target, and the rules that are to be judged on it."""

    target: Target
    chosen: Collection[str]
    tier: str = "ranks"
    # whether the script that it was converted from knows of other ranks
    original_distributed: bool = False
    # whether the script trains other models before it shards one, or prepares that one
    from_sharding_on: bool = False
    # where a step ends in a script that updates its weights itself
    # (probe/events/manual_optimizer_steps.py)
    own_steps: str = ""
    window: Window | None = None  # which steps its runs record; None: the first ones
    cuda_on_cpu: bool = False  # whether ranks have a CUDA that computes on the CPU
    gpus: int = 0  # of this machine
    spawns: bool = False  # whether the script starts its ranks itself, one for each device

    @property
    def needs(self) -> frozenset[str]:
        """The roles that the rules look at.

        What rules only read if it is there is made if all of them do.
        """
        rules = [RULES[name] for name in self.chosen]
        alone = all("resume" in rule.needs | rule.reads for rule in rules)
        needed = frozenset[str]().union(
            *(rule.needs | rule.reads if alone else rule.needs for rule in rules)
        )
        return needed & QUICK if self.target.quick else needed

    def ordered(self, due: list[PlannedRun]) -> list[PlannedRun]:
        """Runs by how many of the rules need them, most first."""
        needs = [RULES[name].needs for name in self.chosen]
        return sorted(due, key=lambda run: -sum(run.role in roles for roles in needs))

    @property
    def steps(self) -> int:
        """How many steps are compared: as many as were asked for, or a few more where the
        checkpoint to resume from needs them.
        """
        target = self.target
        if self.window is not None:
            return self.window.last - self.window.first + 1
        wanted = [
            n for path in named_paths(target.resume_args) if (n := number_in(path)) is not None
        ]
        last, steps = max(wanted, default=0), target.steps or LEAST
        return last + 1 if steps <= last <= FURTHER_STEPS and self.needs & OF_CHECKPOINTS else steps

    def resumes_after(self, evidence: Evidence) -> int | None:
        """The step of the checkpoint from which the script is to resume."""
        return evidence.saved_after(shlex.join(self.target.resume_args))

    def run(self, role: str, world: int, *own: str, **fields: Any) -> PlannedRun:
        """A run of the target with arguments of its own after the common ones."""
        target = self.target
        same = {
            name: getattr(target, name)
            for name in ("script", "cwd", "module", "launcher", "timeout")
        }
        same |= {
            "steps": self.steps,
            "grace": min(GRACE, target.timeout),
            "arguments": (*target.args, *own),
            "cuda_on_cpu": self.cuda_on_cpu,
        }
        asked: dict[str, Any] = {
            "from_sharding_on": self.from_sharding_on,
            "own_steps": self.own_steps,
            "node_devices": target.nproc if self.cuda_on_cpu and not self.spawns else 0,
        }
        probe: dict[str, Any] = {name: value for name, value in asked.items() if value}
        probe |= {"watch": [one.expression for one in target.watch]} if target.watch else {}
        if self.window is not None:
            probe["skip_steps"] = self.window.first - 1
            same |= {
                "weights": f"starting_point.{self.window.first}",
                "note": f"steps {self.window}",
            }
        if probe:
            same["probe"] = probe | fields.pop("probe", {})
        return PlannedRun(role, world, project=target.project, **{**same, **fields})

    def with_steps(self, evidence: Evidence) -> Self:
        """These settings with the number of steps that the survey run suggests, where none was
        asked for.
        """
        if self.target.steps or evidence.survey is None:
            return self
        resumes = bool(self.target.resume_args and self.needs & OF_CHECKPOINTS)
        steps = steps_to_compare(evidence.survey, evidence.sources, resumes)
        waits = trains_before_sharding(evidence.survey)
        return replace(self, target=replace(self.target, steps=steps), from_sharding_on=waits)


def trained(evidence: Evidence) -> bool:
    return evidence.train is not None and evidence.train.completed and evidence.train.steps() > 0
