"""Privacy audits of trained runs: checks of the run folder, and attacks that measure what a run reveals.

    verification       checks that the files of a run folder agree: ledger, configuration, checkpoints, model, statement
    exposure           measures whether the model has memorized phrases that corpus/canaries.py planted
                       (Carlini et al. 2019)
    one_run            lower bounds on epsilon from one run with canary users (Steinke, Nasr and Jagielski 2023)
      lower_bound        computes the bounds from guesses and scores: distribution-free, f-DP, parametric
    summary            runs both attacks on one run; gives the result as sentences, as JSON and as a plot

Commands: `unheard verify`, `unheard canaries`, `unheard audit`.
"""
