"""Content of environments and images: install, compose, record and manifest it."""
