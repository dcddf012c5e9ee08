"""Checks of text: the lint of job scripts, and the diagnosis of job logs."""
