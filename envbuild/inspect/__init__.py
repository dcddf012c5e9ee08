"""Reading and comparing of artifacts of any kind."""
