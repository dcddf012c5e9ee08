"""Attestations: statements about an artifact, their signatures, and whose signatures a site trusts."""
