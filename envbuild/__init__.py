"""One declarative recipe, compiled into verified PyTorch environments."""

__version__ = "0.1.0"
