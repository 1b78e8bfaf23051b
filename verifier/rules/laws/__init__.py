"""What holds for every right training step, whatever its style: a breach is a fault even where no
other rule names it.
"""
