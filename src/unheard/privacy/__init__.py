"""Privacy accounting: events in, epsilon out.

Nothing in this package imports torch, so an auditor can run it on a laptop. The modules follow the privacy argument
(docs/privacy.md) from what happened to what may be claimed:

    events              what one round, or one other release, does to the users' data (q and z)
    ledger              what one run was charged, written before anything of a round exists; the hash-chained file
    population_ledger   what all runs on the same users were charged; the budget over all of them
    run_ledger          charges both ledgers, and checks a run's ledger against everything that remembers it
    accountants         moments, rdp and pld: epsilon at delta, delta at epsilon, the bound that a run claims
    budget              epsilon while training, the stop before the round that would exceed the budget, and what may
                        be claimed when the length of a run was chosen during it (filters, odometer)
    planner             what a run would cost, and which z, cohort or number of rounds meets a target
    statement           what may be claimed about a run, as data and as text; statement_formats for reviewers
    population_statement   the same about all runs on a population

>>> from unheard.privacy.accountants import epsilon
>>> from unheard.privacy.events import PoissonGaussian
>>> one_round = PoissonGaussian(sampling_prob=5000 / 763_430, noise_multiplier=1.0)
>>> round(epsilon([(one_round, 5000)], delta=1e-9, accountant="moments"), 3)  # the paper, Table 1
4.634
"""
