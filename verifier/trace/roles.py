"""The roles in which a script is run: one table, from which the plan, the rules and reports read.

A new role is a row here and a stage that plans it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Role:
    """What runs in this role are.

    `title`: what reports call it. `compared_with`: the role whose losses its own should be; "" if
    they differ by design, or are of one step. `needs`: what there must be before it: nothing, a
    "train" run with steps, or a "checkpoint" to resume from. `resumes`: it loads a checkpoint, and
    the steps before that are none of its own. `quick`: made with `--quick`. `before_oracles`: made
    before all that the train run alone decides. `place`: the role in whose place it stands.
    """

    name: str
    title: str
    compared_with: str = ""
    needs: str = "train"
    resumes: bool = False
    quick: bool = False
    before_oracles: bool = False
    place: str = ""


# In the order in which reports list their runs.
_TABLE = (
    Role(
        "survey",
        "the whole script, for how far to compare",
        "train",
        needs="",
        before_oracles=True,
    ),
    Role("train", "the script", "train", needs="", quick=True, before_oracles=True),
    Role(
        "simulate",
        "one process with a fake process group",
        "train",
        needs="",
        before_oracles=True,
        place="train",
    ),
    Role("provoked", "with amplified gradients, and NaN in uninitialised memory"),
    Role(
        "repeat",
        "the script again, up to the save that is resumed from",
        needs="checkpoint",
        before_oracles=True,
    ),
    Role(
        "full_precision",
        "without mixed precision, autocast and dropout",
        "train",
        quick=True,
    ),
    Role("undropped", "without dropout, one step", "train", place="plain"),
    Role("rounded_weights", "from rounded weights, one step", "plain"),
    Role("reference", "DDP instead of fully_shard", "full_precision", quick=True),
    Role("perturbed", "from weights one unit in the last place away", "reference"),
    Role("scaled", "one step, for the lines that change gradients"),
    Role("layers", "one step, for what each module makes"),
    Role("layers_reference", "the same with DDP"),
    Role("single", "one process, the whole global batch", "full_precision"),
    Role(
        "ending",
        "one process, the whole script, for what it prints and writes at its end",
        "survey",
    ),
    Role(
        "ending_perturbed",
        "the same, from weights one unit in the last place away",
        "ending",
    ),
    Role("original", "the script that it was converted from", "full_precision"),
    Role(
        "resume",
        "resumed at the same world size",
        "train",
        needs="checkpoint",
        resumes=True,
        quick=True,
    ),
    Role(
        "resume_full_precision",
        "resumed, in full precision",
        "full_precision",
        needs="checkpoint",
        resumes=True,
    ),
    Role("resumed_ending", "resumed, to the end of the script", needs="checkpoint"),
    Role(
        "reshard",
        "resumed at another world size",
        "resume_full_precision",
        needs="checkpoint",
        resumes=True,
    ),
    Role(
        "resharded_ending",
        "resumed at another world size, to the end of the script",
        needs="checkpoint",
    ),
    Role("inspect", "opens the saved checkpoints", before_oracles=True),
    Role("crash", "killed during a save", needs="checkpoint"),
    Role("recovered", "resumed after the kill", needs="checkpoint", resumes=True),
    Role("damaged", "resumed from a damaged checkpoint", needs="checkpoint", resumes=True),
)
ROLES = {role.name: role for role in _TABLE}
QUICK = frozenset(role.name for role in _TABLE if role.quick)
AFTER_TRAIN = tuple(role.name for role in _TABLE if role.needs)
# a rule that needs one of these judges what a resume makes of a checkpoint
OF_CHECKPOINTS = frozenset(role.name for role in _TABLE if role.needs == "checkpoint")
PLACES = tuple(dict.fromkeys(role.place or role.name for role in _TABLE))
