"""Checks on every node of a job before training, for faults that let it hang: `python -m ddp_train.preflight`.

Needs nothing but Python.
"""
