"""The contract: the facts about an artifact that other rooms may use, as data and readers of its small files.

Nothing here builds, opens an image or starts a training.
"""
