"""Text in, findings out: the lint of job scripts and the diagnosis of their logs."""
