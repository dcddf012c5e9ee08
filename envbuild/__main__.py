"""`python -m envbuild`."""

from envbuild.cli import main

main()
