"""The plan of a build: ordered steps, each with a digest of all that determines its bytes."""
