#!/bin/sh
# libs is where the host's libraries are mounted, the driver's with --nv.
LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/.singularity.d/libs"
PS1="${PS1:-Apptainer> }"
export LD_LIBRARY_PATH PS1
