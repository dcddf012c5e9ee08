"""The base floor: files, processes, locks, progress, errors and strict TOML, which know nothing of environments."""
