"""Build, verify and commit artifacts: one module for each kind, and the engine that fills folders and images."""
