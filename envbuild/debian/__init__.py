"""A base image from Debian packages: resolved, locked, fetched and unpacked without Debian's tools.

sources.py    locations of archives: a site's mirror, the host's apt sources, snapshots by date
release.py    the signed index of one archive: signature, suite, Packages
control.py    control files, dependency fields and versions, as Debian Policy defines them
resolve.py    names → all packages of several suites that they need, with the reason for each failure
lock.py       the lock of a base, as a table
base.py       names → a lock, a lock → files, over the network
deb.py        one package as a stream
rootfs.py     packages → the tree of one layer
generated.py  files of that tree that no package has
defaults.py   the packages of a base and the rules of its tree, from data/debian.toml
"""
