"""The contract: all that other rooms may know of an artifact, as data and readers of its small files.

Nothing here builds, opens an image or starts a training.
"""
