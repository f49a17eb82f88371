"""Engines compute the sum of the clipped updates of a cohort. All engines compute the same sum; they differ in speed.

engine          the protocol of an engine, and the cohort that it sums
reference       a loop over users, as in the paper; the other engines must agree with it
vectorised      any model: many users at once on a GPU, one user per core on a CPU
  packed          Hugging Face models, with the windows of many users in one stream
stacked/        the paper's models, with gradients written out by hand
distributed/    several processes as one engine
choice          the `[engine]` table of a run file: engine, device and precision
"""
