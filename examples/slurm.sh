#!/bin/bash
# A run on several machines under Slurm: sbatch examples/slurm.sh RUN.toml OUT
# Fill in: partition, number of machines, GPUs of each, time. RUN.toml, OUT, the corpus and the environment lie on a disk that all see.
# Send it again after it ended early: it continues from the last checkpoint, and what is done again is charged again.
#SBATCH --job-name=unheard
#SBATCH --partition=FILL_IN
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --exclusive
set -euo pipefail

run=$1 out=$2
gpus=8  # as in --gpus-per-node
leader=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

if [ -f "$out/run.toml" ]; then
  what=(resume "$out")
else
  what=(train "$run" --out "$out")
fi

# One launcher on each machine; it starts one process for each GPU, and all of them again (three times) if one dies.
srun --kill-on-bad-exit=0 torchrun \
  --nnodes "$SLURM_NNODES" \
  --nproc-per-node "$gpus" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$leader:29500" \
  --max-restarts 3 \
  -m unheard "${what[@]}"
