"""One diagnosis engine and one table of rules: logs of jobs, of verification, of source builds."""
