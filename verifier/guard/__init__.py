"""The laws in the real run: watches a training at its real size, and changes nothing in it.

`site/` and `verified_fsdp2.guard` start it in each rank; `watch.py` sees steps, forwards, saves and
loads; `laws/` hold them; ranks compare through the store of the process group, never by a
collective: a rank that is missing makes a comparison late and hangs nobody.
"""
