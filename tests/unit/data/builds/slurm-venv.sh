#!/bin/bash
#SBATCH --job-name=pt_cpu-build
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=icelake
#SBATCH --account=p1
#SBATCH --time=01:00:00
#SBATCH --chdir=/fsx/ada
#SBATCH --output=logs/%x_%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --exclusive
# The folder logs must be there: `envbuild job --submit` makes it, sbatch does not.
# envbuild VERSION: builds the venv environment of pt_cpu for cpu-x86_64 on a node of site lab
stop() { # message, exit code
    printf 'envbuild: %s\n' "$1" >&2
    exit "${2-6}"
}

# Exactly these modules, at run time too.
set +eu
# shellcheck disable=SC1090,SC1091
. /etc/profile.d/lmod.sh
type module >/dev/null 2>&1 || stop 'there is no module command; say [modules] init of the site'
module purge
module load python/3.11.7 || stop 'module python/3.11.7 cannot be loaded; change [modules] of the site'
set -eu
set -euo pipefail
cd /fsx/ada
unset XDG_RUNTIME_DIR
export https_proxy=http://proxy:3128
export SSL_CERT_FILE=/etc/ca.pem
export TMPDIR=/scratch
command -v /fsx/tools/bin/envbuild >/dev/null || stop 'this node does not see envbuild; install it on a shared file system, or build from a --bundle'
export ENVBUILD_STORE=/fsx/cache/envbuild
mkdir -p /fsx/ada/build/pt_cpu/cpu-x86_64
# Verification simulates its nodes on this one; its receipt goes beside the environment.
exec /fsx/tools/bin/envbuild venv /home/ada/recipes/pt_cpu --target cpu-x86_64 --prefix /fsx/ada/build/pt_cpu/cpu-x86_64/venv --locked
