#!/usr/bin/env bash
# Several nodes under SLURM: sbatch scripts/slurm.sh run=NAME dataset=sop dataset.root=DIR data.batch_size=1440
# srun starts one process per GPU; Lightning reads rank and address from SLURM's variables. Add partition, account and time of your
# cluster to the command line of sbatch. Two minutes before its time limit, or when it is preempted, the job gets SIGTERM: its
# processes stop after the same step (exit code 75), the job is requeued, and the run is resumed after its last whole epoch.
#SBATCH --job-name=proxy-anchor
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
export OMP_NUM_THREADS=1
export STOPPED=".stopped-$SLURM_JOB_ID" # in the folder of the command, which all nodes share
rm -f "$STOPPED"
# srun kills all tasks when one fails, and returns the exit code of the killed ones: 75 must not count as a failure. The shell
# around each task ignores the signal, which every process of a step gets.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 \
	bash -c 'trap : TERM USR1; "$@" || { code=$?; ((code == 75)) || exit "$code"; touch "$STOPPED"; }' task \
	"${PYTHON:-python}" src/train.py \
	trainer.num_nodes="$SLURM_JOB_NUM_NODES" trainer.devices="$SLURM_NTASKS_PER_NODE" trainer.strategy=ddp "$@"
if [ -e "$STOPPED" ]; then
	rm -f "$STOPPED"
	scontrol requeue "$SLURM_JOB_ID"
	exit 75
fi
