#!/bin/bash
# Training with PyTorch on the GPUs of one or more Slurm nodes, in a container: pyxis with enroot, or Apptainer.
#
# Edit:   the #SBATCH lines, then `image` to `launch`.
# Run:    sbatch slurm.sh
# Follow: tail -f train-JOBID.out
# First:  let dist-check show whether the nodes can compute together: without it, training hangs with no message.
#         command=(--no-python dist-check)
#
# The nodes need a driver for the CUDA of the image: its label io.github.gpu-images.driver names the oldest one.
#SBATCH --job-name=train
#SBATCH --output=%x-%j.out
#SBATCH --nodes=2
# One task for each node: torchrun starts a process for each GPU.
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
# Without this, a task has one CPU, which is not much for a DataLoader.
#SBATCH --cpus-per-task=64
#SBATCH --mem=512G
#SBATCH --time=8:00:00
set -euo pipefail

# This tag moves to each new release. A stamped tag (2.9.1-cu128-py313-20261122) never moves. enroot 3 cannot pull by
# digest, Apptainer can.
image=registry.example.com/org/pt-cuda:2.9
runtime=pyxis  # or apptainer
# Mounted at /workspace: a folder that all nodes share. Neither runtime can mount a path with `:` or `,`.
workspace=$SLURM_SUBMIT_DIR
command=(/opt/examples/pytorch/train_ddp.py --epochs 3 --resume)

# What runs on each node; "$@" is the command. Single quotes, because SLURM_NODEID differs on each node: the shell there
# expands it. With the static rendezvous, it is the rank of the node.
# shellcheck disable=SC2016
launch='exec torchrun --nnodes="$SLURM_JOB_NUM_NODES" --node-rank="$SLURM_NODEID" --nproc-per-node=gpu \
  --rdzv-backend=static --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" "$@"'
# For TensorFlow; tf.distribute.MultiWorkerMirroredStrategy reads TF_CONFIG:
# launch='export TF_CONFIG="{\"cluster\": {\"worker\": [$WORKERS]},
#   \"task\": {\"type\": \"worker\", \"index\": $SLURM_NODEID}}"
#   exec python "$@"'
# For JAX; a script of yours gives these three values to jax.distributed.initialize. One process uses all GPUs of a
# node: without JAX_LOCAL_DEVICE_IDS, JAX recognizes Slurm, and uses one.
# launch='export JAX_LOCAL_DEVICE_IDS=$(seq -s , 0 $((SLURM_GPUS_ON_NODE - 1)))
#   exec python "$@" --coordinator "$MASTER_ADDR:$MASTER_PORT" --processes "$SLURM_JOB_NUM_NODES" \
#   --process "$SLURM_NODEID"'

# If NCCL takes the wrong network: export NCCL_SOCKET_IFNAME=eth0
# For InfiniBand, slurm.conf needs PropagateResourceLimitsExcept=MEMLOCK: otherwise the limit of locked memory is that
# of the login node. If the site's enroot restricts /dev: export MELLANOX_VISIBLE_DEVICES=all

# Packages of loaded modules and of your home must not replace those of the image.
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1

# All nodes connect to the first one. Other jobs may use it too, so the port depends on the job.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${nodes[0]}
export MASTER_PORT=$((29500 + SLURM_JOB_ID % 1000))
WORKERS=$(printf ',"%s:'"$MASTER_PORT"'"' "${nodes[@]}")
export WORKERS=${WORKERS:1}

# Neither runtime has options for /dev/shm: it is that of the node, and its contents count as memory of the job.
# Since Slurm 22.05, srun does not inherit --cpus-per-task. If one node fails, the step ends on all nodes.
step=(srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1)
case $runtime in
  pyxis)
    # enroot writes registry#name. You are the same user as outside, and your home is not in the container.
    step+=(
      --container-image="${image/\//#}"
      --container-mounts="$workspace:/workspace"
      --container-workdir=/workspace
      --no-container-mount-home
      --no-container-remap-root
      --no-container-entrypoint
    )
    ;;
  apptainer)
    # Pulled once, to a file that all nodes can read; renamed at the end, so that an interrupted pull leaves none.
    sif=$workspace/$(basename "${image//[:@]/-}").sif
    if [ ! -e "$sif" ]; then
      apptainer pull "$sif.$SLURM_JOB_ID" "docker://$image"
      mv "$sif.$SLURM_JOB_ID" "$sif"
    fi
    step+=(apptainer exec --nv --no-home --bind "$workspace:/workspace" --pwd /workspace "$sif")
    ;;
  *)
    echo "runtime is $runtime: set it to pyxis or apptainer" >&2
    exit 2
    ;;
esac

"${step[@]}" bash -c "$launch" launch "${command[@]}"
