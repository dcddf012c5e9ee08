"""Verification of artifacts: launch the trainer on simulated nodes (run), judge the results, write the receipt."""
