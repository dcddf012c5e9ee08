"""Base layer, independent of environments: files, processes, locks, progress, errors and strict TOML."""
