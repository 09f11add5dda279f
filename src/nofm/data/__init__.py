"""Images, pairs of frames and sentences: where they come from, in which order they are seen, what is done to them on the way.

All chance here is a function of (seed, epoch, example) or (seed, step), never of a generator that moves along: a run that is
resumed at step 1,000 sees the examples that an uninterrupted run sees there, with any number of loader processes.
"""
