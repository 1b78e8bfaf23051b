"""The only place of private names of torch: `names` is the table, the other modules use them for
the probe.
"""
