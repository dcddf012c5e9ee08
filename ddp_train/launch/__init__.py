"""The part of a job that runs on each node: it finds the other nodes, and starts the preflight or the training.

`python -m ddp_train.launch` needs Python alone. The scripts of `envbuild job` start it.
"""
