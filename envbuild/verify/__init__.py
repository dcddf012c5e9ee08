"""Verification of artifacts: launch the trainer on simulated nodes, judge the results, write the receipt."""
