"""The numbers that decide verdicts: each with its derivation, and the test that pins it.

"Relative" is relative to the scale that the comparison names. A number that no test pins is bounded
by the right scripts and faults of the corpus alone. Bounds of what is recorded stand where they are
used: they leave something unknown, and never decide.
"""

# Runs from the same weights, on the same samples (analysis/comparison.py)
# Times the noise that one perturbed run has measured: it is a single sample, and another order of
# sums may be several times as far apart. 16 itself is chosen (references/verify.md). Pinned:
# test_localise, test_docs.
MULTIPLE = 16.0
# Relative; 32 units in the last place of float32: a few additions in another order, where the noise
# itself is 0. Pinned: test_localise, test_never_the_fault_numbers.
FLOOR = 2.0**-18
FLOAT32 = 2.0**-23  # a unit in the last place, relative
# Times FLOOR, for a gradient whose terms cancel and leave their rounding: 1.1e-5 was seen in exam
# round 4 l_19_pcgrad_multitask. Pinned: test_localise.
CANCELLED = 16.0
# Relative, for an update made of a difference of two losses, whose rounding a small step
# multiplies. Bounded by zoo/zeroth_order.
FROM_LOSSES = 2.0**-10
# Times what is allowed, where single parameters are judged: the noise of one is a sample of few
# elements. Missed in exam round 8: a trust ratio of local shards.
CLEARLY = 8.0
# Relative, where no noise was measured: ten times the largest difference of right runs that was
# seen (parameters of AdamW, 5e-3). Pinned: test_no_envelope.
GROSS = 0.05
# Of the whole gradient: a gradient below it is compared on this scale, since relative to itself its
# rounding has any size. Pinned: test_a_gradient_of_rounding_beside_none_or_zero.
FAINT = 1e-3
# Relative change of the losses by one unit in the last place of the weights, from which on nothing
# is left to compare. Chosen; pinned as a text by test_docs.
UNREPRODUCIBLE = 0.05
# Times the noise of rounded weights: activations and gradients are rounded, too. Pinned between 2.3
# and 9: test_low_precision.
LOW_MULTIPLE = 4.0
# Unit in the last place of a dtype: 8 and 11 bits of significand.
LOW_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# Of the norm of the largest gradient: one below it may be rounding alone, of which Adam makes whole
# updates (exam round 11 mc_01_twotower_init). Pinned: test_updates_that_rounding_makes.
CANCELS = 1e-5
# Of the sum of the absolute values of a step's samples, how far two sums of the same numbers in
# float64 may be apart: 1e-16 for each of up to ten million numbers (flow_surrogate_slabs).
SAME_SUMS = 1e-9
# Of the whole gradient, what one value that crosses a kink (ReLU) may change: 0.0019 was seen in
# exam round 9 hd_08_lora_ema.
NONSMOOTH_STEP = 0.02
# Relative, above the rounding of one module: names the place only.
SAME_OUTPUT = 1e-4
# Relative difference of the first losses, from which on modules are compared; below it is rounding.
LAYERS_FROM = 1e-4

# Resumes and ends of a training
# Relative: a restored value has the same bits, a forward on it may round otherwise.
SAME_STATE = 1e-6
# Relative: what rounding has grown to over a whole training; another split or scale leaves more.
# Pinned: test_weights_at_the_end_of_one_process.
SAME_END = 1e-4
# Times the limit of a first step, in later ones: right scripts were seen at 20 (exam round 7
# fd_06), faults at thousands. Pinned between 4 and 3000:
# test_later_losses_after_resharding_may_be_further_apart.
RESHARD_GROWN = 100
# Samples of a step, from which on it is not by chance that all of them come again. Pinned:
# test_a_resume_with_a_smaller_batch.
RESHARD_SAMPLES = 4
# Steps after resharding: rounding grows with each of them (after exam round 8).
MOST_RESHARDED = 10
# Steps after the checkpoint: a lost counter of an average shows with its first update.
LATER = 3
# Relative: so far two whole trainings may end apart that agree step by step.
ENDING = 2e-3
# Relative, of a number that is printed: one sample more or less in an accuracy.
PRINTED = 1e-2
# Relative: rounding changes a value by at most 2^-9 of it; doubled for an estimated distance. Words
# of a failure only.
BFLOAT16 = 2.0**-8
# Of the factor of adapters in an export of 16 bits, which rounding moves by 1 % at most; a wrong
# scale is a factor (exam round 3 g_09_rslora_merge). Pinned: test_merged_weights.
MERGED = 1e-2
# Of the state of a generator of torch, on the CPU and on CUDA. Pinned:
# test_random_states_without_a_resume.
GENERATOR_BYTES = (5056, 16)

# Gradients and clips
# Relative: factors are whole numbers of ranks and micro-batches; far above rounding, far below
# each. Pinned: test_never_the_fault_numbers.
NEAR = 1e-3
# Relative: how near to a number a factor must be to be called that number. Words only; pinned:
# test_localise.
NAMED_FACTOR = 1e-3
# Relative: one clip multiplies all its gradients by the same float32.
ONE_CLIP = 1e-5
# Relative, where no second parameter shows how exact a factor is.
ABOUT_ONE_CLIP = 1e-3
# Of a change of gradients, what may be off a multiple of them: more is no scaling.
STRAIGHT = 1e-4
# Times as many targets in one micro-batch as in another change a mean of means. Pinned between 1
# and 2: test_rules.
UNEVEN_TARGETS = 1.05

# State, weights and buffers on ranks
# Relative: forwards on equal bits may round otherwise (1e-7); statistics of other batches differ by
# per cent.
SAME_ON_RANKS = 1e-5
# Relative: another order of summation makes less than 1e-5 of a statistic, a mean of the ranks' own
# per cent.
STATISTICS = 1e-3
# Of a tensor of the loop: a smaller one may be a few sums for a log (exam round 1).
LEAST_ELEMENTS = 16
# Of the norm: twice what bfloat16 takes from it (2^-8); other random numbers are off by about 1.
# Pinned: test_low_precision.
HELD_IN_BFLOAT16 = 2.0**-7
# Steps of the first optimizer, more than lie before the first step of one that takes turns with it.
# Pinned: test_laws.
LATE = 2
# Relative: what taking adapters out leaves of what was added, 1e-7 to 1e-5 in float32.
TAKEN_OUT = 1e-4
# Share of the elements of an average that should have moved and stand still. Pinned:
# test_laws_of_averages.
MOST_LOST = 0.5
# Bytes of imbalance that cost nothing.
LEAST_IMBALANCE = 1 << 20
# Times the even share: padding is at most that for dims of at least as many rows as ranks. Bounded
# by faults/uneven_experts.
UNEVEN_SHARDS = 2.0

# Samples, and what chance makes of them
# Probability that independent draws give the equal batches that were seen.
EQUAL_BATCHES = 1e-4
# Probability that draws give so many equal batches, over all pairs of ranks and distances.
REPEATED_BATCHES = 1e-6
# Steps of an epoch: fewer hold too few batches. Pinned: test_each_sample_once.
LEAST_STEPS = 4
# Steps in which a rank trains on the whole batch that another had so many steps before: once or
# twice may be padding. Pinned: test_later.
BATCHES_AGAIN = 3
# Samples that ranks share in later epochs and not in the first. Pinned: test_later_epochs.
SHARED_LATER = 4
# Samples that two runs have in common by chance, and times as many as they have, before data count
# as augmented.
MANY = 20
# Steps with one batch: it may be used twice on purpose. Pinned: test_laws.
SAME_STEPS = 3
# Times that one state is met, unless an evaluation sets it: a phase may be repeated once on
# purpose. Pinned: test_rules_numbers.
STATE_AGAIN = 3
# Probability that shared held-out samples would all be on other ranks.
HELD_OUT = 1e-3
# Texts that two ranks number both: fewer may be settings or labels. Pinned:
# test_ranks_number_words.
LEAST_TEXTS = 4

# How far runs go, and how long they may take
# Steps that are compared: what one carries to the next, and a bound where they are slow. Pinned:
# test_how_many_steps_are_compared.
LEAST, MOST = 5, 20
# The most where so many take QUICK seconds; 40 before exam round 7, where a metric was first
# computed at step 40.
MOST_FAST = 100
# What more steps than MOST may cost.
QUICK_SECONDS = 8.0
# The last step up to which the first save is waited for: exam round 6 missed a counter saved after
# the 20th. Pinned: test_the_first_save_is_waited_for.
FIRST_SAVE = 60
# Of a window behind the compared steps: steps after the one that changes something, and the most
# where several changes follow one another; how many windows, and how many seconds they may take.
AFTER_A_CHANGE, LONGEST_WINDOW = 1, 6
MOST_WINDOWS, WINDOWS_SECONDS = 3, 30.0
# Steps after a block that a condition guards: one shows what it changed, one what that did.
AFTER_A_BLOCK = 2
# The first step of a run also initialises. Pinned: test_simulate.
SIMULATED_STEPS = 2
# A longer script is ended; what it would have reached is not known.
SURVEY_SECONDS = 30.0
# More steps are made, up to this many, to write the checkpoint that `--resume-args` names. Pinned:
# test_steps_are_chosen_so_that_the_checkpoint_is_written.
FURTHER_STEPS = 20
# Seconds that the other ranks get after the first has failed, to record their own error: a victim
# is not taken for the cause.
GRACE, CRASH_GRACE = 8.0, 3.0
# Seconds, and times the longest run so far: later runs make as much as the first.
LEAST_TIMEOUT, SLOWER = 60.0, 10.0
# Of a time limit: a run that recorded something in the last part of it was slow, not stuck. Pinned:
# test_a_run_that_goes_on_is_slow_and_does_not_hang.
STILL = 0.1
