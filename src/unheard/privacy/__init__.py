"""Privacy accounting: record the events of a run, and compute the epsilon that the run may claim.

No module of this package imports torch, so an auditor can run it on a laptop. The modules follow the privacy argument
(docs/privacy.md), from the events to the claim:

    events                what one round, or one other release, does to the users' data (q and z)
    ledger                the hash-chained file of the events that one run was charged for, each before its round starts
    population_ledger     what all runs on the same users were charged; the budget over all of them
    run_ledger            charges both ledgers, and checks a run's ledger against its other records
    accountants           moments, rdp and pld: epsilon at delta, delta at epsilon, the bound that a run claims
    budget                the running epsilon; refuses a round that would exceed the budget; the claim of a run whose
                          length was chosen during training (filters, odometer)
    planner               what a run would cost, and which z, cohort or number of rounds meets a target
    matrix_factorization  the coefficients of correlated noise and their sensitivity
    noise_choice          which kind of noise, independent or correlated, has the smallest error at a target epsilon
    trade_off             what the best attacker can achieve under the guarantee
    statement             what may be claimed about a run, as data and as text
    saved_statement       compares the saved statement of a run with its ledger
    statement_formats     the statement in the formats that reviewers ask for
    population_statement  what may be claimed about all runs on a population

>>> from unheard.privacy.accountants import epsilon
>>> from unheard.privacy.events import PoissonGaussian
>>> one_round = PoissonGaussian(sampling_prob=5000 / 763_430, noise_multiplier=1.0)
>>> round(epsilon([(one_round, 5000)], delta=1e-9, accountant="moments"), 3)  # the paper, Table 1
4.634
"""
