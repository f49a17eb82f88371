#!/bin/bash
# A run on several machines under Slurm: sbatch examples/slurm.sh RUN.toml OUT
#
# Fill in the partition, the number of machines, the GPUs per machine and the time. RUN.toml, OUT, the corpus and the
# Python environment must be on a disk that all machines share. If the job ends early, submit it again: it continues from
# the last checkpoint. Rounds that are repeated are charged again.
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

# One launcher per machine starts one process per GPU. If a process dies, all are restarted, at most three times.
srun --kill-on-bad-exit=0 torchrun \
  --nnodes "$SLURM_NNODES" \
  --nproc-per-node "$gpus" \
  --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$leader:29500" \
  --max-restarts 3 \
  -m unheard "${what[@]}"
