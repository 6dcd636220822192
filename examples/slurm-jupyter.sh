#!/bin/bash
# JupyterLab on a GPU of a Slurm node, in a container: pyxis with enroot, or Apptainer.
#
# Edit:   the #SBATCH lines, then `image`, `runtime` and `workspace`.
# Run:    sbatch slurm-jupyter.sh
# Reach:  the output file has the `ssh -L` line for your machine, then the address and the token. Your umask decides who
#         can read it. To choose the token: JUPYTER_TOKEN=... sbatch slurm-jupyter.sh
# Stop:   scancel JOBID
#SBATCH --job-name=jupyter
#SBATCH --output=%x-%j.out
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
# Without this, a task has one CPU.
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=8:00:00
set -euo pipefail

# This tag moves to each new release. A stamped tag (2.9.1-cu128-py313-jupyter-20261122) never moves. enroot 3 cannot
# pull by digest, Apptainer can.
image=registry.example.com/org/pt-cuda:2.9-jupyter
runtime=pyxis  # or apptainer
# Mounted at /workspace. Neither runtime can mount a path with `:` or `,`.
workspace=$SLURM_SUBMIT_DIR

# Packages of loaded modules and of your home must not replace those of the image.
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1
export GPU_REQUIRED=1

# Others may run Jupyter on this node: the port depends on the job, and the token goes to a /tmp of its own.
state=$(mktemp -d)
trap 'rm -rf "$state"' EXIT
export JUPYTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
echo "Run this on your machine, then open the address that follows:"
echo "  ssh -N -L $JUPYTER_PORT:$(hostname):$JUPYTER_PORT LOGIN_NODE"

# Since Slurm 22.05, srun does not inherit --cpus-per-task.
step=(srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}")
case $runtime in
  pyxis)
    # enroot writes registry#name. You are the same user as outside, and your home is not in the container.
    step+=(
      --container-image="${image/\//#}"
      --container-mounts="$workspace:/workspace,$state:/tmp"
      --container-workdir=/workspace
      --no-container-mount-home
      --no-container-remap-root
      --no-container-entrypoint
    )
    ;;
  apptainer)
    # Pulled once; renamed at the end, so that an interrupted pull leaves no file.
    sif=$workspace/$(basename "${image//[:@]/-}").sif
    if [ ! -e "$sif" ]; then
      apptainer pull "$sif.$SLURM_JOB_ID" "docker://$image"
      mv "$sif.$SLURM_JOB_ID" "$sif"
    fi
    step+=(apptainer exec --nv --no-home --bind "$workspace:/workspace" --bind "$state:/tmp" --pwd /workspace "$sif")
    ;;
  *)
    echo "runtime is $runtime: set it to pyxis or apptainer" >&2
    exit 2
    ;;
esac

"${step[@]}" start services
