"""Privacy audits of trained runs: checks of the run folder, and attacks that measure what a run reveals.

    verification       does a run folder fit together: ledger, configuration, checkpoints, model, statement
    planted_phrases    random phrases to plant in users' text, and the record of those that a store holds
    exposure           has the model memorized a planted phrase (Carlini et al. 2019)
    one_run            lower bounds on epsilon from one run with canary users (Steinke, Nasr and Jagielski 2023)
      canary_users       users that each add a known vector of maximal norm
      background_users   the users of the store, who may take part in the same audit
      lower_bound        from correct guesses to a lower bound on epsilon, distribution-free and by f-DP
      parametric_bound   from scores to a lower bound on epsilon, with Gaussian noise of known size
    summary            both attacks on one run, their result as sentences, as JSON and as a plot

Commands: `unheard verify`, `unheard canaries`, `unheard audit`.
"""
