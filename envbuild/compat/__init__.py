"""Compatibility of a stack, from driver, CUDA, torch and NCCL to the network, judged by data with sources."""
