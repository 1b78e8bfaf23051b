"""The budget of tokens per step is constant; sequences get longer in stages, so that there are fewer of them."""

BUDGET = 512
STAGES = [(0, 8), (8, 16), (16, 32), (24, 64)]


def length_at(step):
    return [length for first, length in STAGES if step >= first][-1]


def rows_at(step):
    return BUDGET // length_at(step)


def tokens_before(step):
    return step * BUDGET
