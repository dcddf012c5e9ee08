"""Diagnosis of logs (of jobs, verification and source builds): one engine and one table of rules."""
