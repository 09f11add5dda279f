"""Images for classification: where they come from, in which order they are seen, what is done to them on the way.

All chance here is a function of (seed, epoch, image) or (seed, step), never of a generator that moves along: a run that is
resumed at step 1,000 sees the images that an uninterrupted run sees there, with any number of loader processes.
"""
