"""The lint of job scripts and of Kubernetes jobs."""
