"""A run happens in a world of its own: nothing that it writes reaches the user's files.

| mechanism | how | needs | |---|---|---| | overlay | overlayfs over every place in a mount
namespace; writes land in a layer of the run | namespaces, overlayfs | | copy | the run works in a
private copy of the project; other writes are stopped, as in `guard` | seccomp | | guard | the run
works in place; each write to a path that is not its own is stopped | seccomp |

`choose.py` decides, once for each verification, by trying. `worlds.py` prepares the world of each
run in the verifier; `enter.py` puts the process that manages the run into it, with all that this
process will start.
"""
