"""Compatibility of a stack (driver, CUDA, torch, NCCL, network), checked against data with sources."""
