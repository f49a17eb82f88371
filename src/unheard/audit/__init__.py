"""Privacy audits of trained runs: checks of the run folder, and attacks that measure what a run reveals.

    verification       does a run folder fit together: ledger, configuration, checkpoints, model, statement
    exposure           has the model memorized a planted phrase (Carlini et al. 2019; corpus/canaries.py plants them)
    one_run            lower bounds on epsilon from one run with canary users (Steinke, Nasr and Jagielski 2023)
      lower_bound        from guesses and scores to lower bounds on epsilon: distribution-free, f-DP, parametric
    summary            both attacks on one run, their result as sentences, as JSON and as a plot

Commands: `unheard verify`, `unheard canaries`, `unheard audit`.
"""
