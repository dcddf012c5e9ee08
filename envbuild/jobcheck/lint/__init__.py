"""Lint of job scripts and of Kubernetes manifests."""
