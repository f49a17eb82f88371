"""Training: the configuration of a run, its run folder, the round of Algorithm 1 and the loop over rounds.

Modules: `run` (what a run is, and its TOML form), `new_run_file` (a commented file to start from), `initialise` (checks;
a new or reopened run folder), `round` (one round, with the server's step), `loop` (`train`, `resume`, `train_together`),
`noise_state` (the past of correlated noise), `checkpoint`, `released` (a trained model for use), `worker` (training on
several processes).
"""
