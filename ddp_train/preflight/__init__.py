"""Before training, every node finds out what would let it hang: `python -m ddp_train.preflight`. Needs Python alone."""
