CONTAINER=horovod_latest.sif # The path to the container
apptainerArgs="
  --nv
  -B ${ML_DIST_ROOT}:${ML_DIST_ROOT}
  ${CONTAINER}
  python $TRAIN_SCRIPT $trainArgs
"
mpirun $mpiArgs apptainer run $apptainerArgs
