#!/bin/bash -l
#PBS -N gh200-build
#PBS -l select=1:ncpus=288:mpiprocs=1:ngpus=4:sales_op=none
#PBS -l walltime=01:00:00
#PBS -l place=scatter:excl
#PBS -q workq
#PBS -r y
#PBS -j oe
#PBS -o logs/gh200-build.pbs
# envbuild VERSION: builds the venv environment of gh200 for cu126-aarch64 on a node of site lab
stop() { # message, exit code
    printf 'envbuild: %s\n' "$1" >&2
    exit "${2-6}"
}

# Exactly these modules, at run time too.
set +eu
type module >/dev/null 2>&1 || stop 'there is no module command; say [modules] init of the site'
module purge
module load cray-python/3.11.7 || stop 'module cray-python/3.11.7 cannot be loaded; change [modules] of the site'
module load cuda/12.6 || stop 'module cuda/12.6 cannot be loaded; change [modules] of the site'
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
exec python3.11 -m envbuild venv /fsx/ada/bundle/recipes/gh200 --target cu126-aarch64 --prefix /fsx/ada/build/pt_cpu/cpu-x86_64/venv --locked --offline
