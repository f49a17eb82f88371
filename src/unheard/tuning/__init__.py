"""Chooses the clipping bound S and the noise sigma of a private run, as section 3 of the paper does.

Two ways to tune a run:

    unheard tune                   sweeps S, then sigma, with few users per round; not private, for public or proxy text
      trials.py                      defines the runs to train (baseline, clip, noise) and reads the accuracy of each
      pipeline.py                    trains them, stage by stage, and chooses S and sigma
      output.py                      plans the private run, computes the cost of the tuning, and writes two files
    unheard tune --select          trains a secret number of private candidates and releases only the best
      private_selection.py           implements the selection and its charge, after Papernot and Steinke (2022)
"""
