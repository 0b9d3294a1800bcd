#!/usr/bin/env bash
# Several nodes under SLURM: sbatch scripts/slurm.sh run=NAME dataset=sop dataset.root=DIR data.batch_size=1440
# srun starts one process per GPU, Lightning reads rank and address from SLURM's variables. Partition, account and time are the
# cluster's: add them on the command line of sbatch.
#SBATCH --job-name=proxy-anchor
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@120
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export OMP_NUM_THREADS=1
srun --kill-on-bad-exit=1 "${PYTHON:-python}" src/train.py \
	trainer.num_nodes="$SLURM_JOB_NUM_NODES" trainer.devices="$SLURM_NTASKS_PER_NODE" trainer.strategy=ddp "$@"
