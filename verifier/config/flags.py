"""The names of the settings of a target that a command line may give; a configuration has the same
ones.
"""

FLAGS = (
    *(
        "module",
        "root",
        "nproc",
        "steps",
        "windows",
        "reshard_to",
        "save_args",
        "resume_args",
        "single_args",
        "reshard_args",
    ),
    *(
        "prepare",
        "reference",
        "thorough",
        "quick",
        "budget",
        "timeout",
        "device",
        "launcher",
        "oversubscribe",
        "watch",
    ),
    *("isolation", "allow_writes", "require"),
)
