APPTAINER_CACHEDIR="/not/my/home/directory"
apptainer pull docker://pytorch/pytorch
