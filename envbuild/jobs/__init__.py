"""Jobs of a cluster: plan, render, preflight and submit the training with an artifact."""
