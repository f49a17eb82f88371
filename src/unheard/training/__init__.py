"""Training: from the configuration of a run and a token store to a released model.

    run             the configuration of a run, and its run file; `new_run_file` writes a commented one
    initialise      checks a run against its store (`TokenStore.train` are its users), and creates its folder
    loop            `train`, `resume` and `train_together`: charge a round to the ledgers, then run it
    round           one round of Algorithm 1: cohort, sum of the updates, average, noise, the server's step
    checkpoint      saves the state; the model of each checkpoint is the released model of the run folder
    released        opens the released model, for prediction and evaluation

`noise_state` keeps the keys and the earlier noise of correlated noise; `worker` trains on several processes.
"""
