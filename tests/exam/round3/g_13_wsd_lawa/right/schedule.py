"""warm-up, constant, linear decay: a pure function of the step, so that nothing has to be stored"""


def wsd(step, total, warmup=4, decay_fraction=0.3):
    decay_start = int(total * (1 - decay_fraction))
    if step < warmup:
        return (step + 1) / warmup
    if step < decay_start:
        return 1.0
    return max(0.0, 1.0 - (step + 1 - decay_start) / (total - decay_start))
