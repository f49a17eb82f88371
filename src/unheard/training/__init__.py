"""Training: configuration of a run, its run folder, the round of Algorithm 1 and the loop over rounds.

Modules: `run` (what a run is), `run_file` (its TOML form), `validate` (checks), `initialise` (a new or reopened run
folder), `round` (one round), `loop` (`train`, `resume`, `train_together`), `server` (optimisers on the noisy average),
`checkpoint`, `released` (a trained model for use), `worker` (training on several processes).
"""
