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
# All that the build reads is in the bundle.
bundle=/fsx/ada/bundle
export PYTHONPATH="$bundle/envbuild"
command -v python3.11 >/dev/null || stop 'there is no python3.11 on this node; add its module to [modules] build of the site'
export ENVBUILD_STORE=/fsx/ada/bundle/store
mkdir -p /fsx/ada/build/pt_cpu/cpu-x86_64
# Verification simulates its nodes on this one; its receipt goes beside the environment.
exec python3.11 -m envbuild venv /fsx/ada/bundle/recipes/pt_cpu --target cpu-x86_64 --prefix /fsx/ada/build/pt_cpu/cpu-x86_64/venv --faults --locked --offline
