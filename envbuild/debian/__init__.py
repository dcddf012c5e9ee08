"""A base image from Debian packages: resolved, locked, fetched and unpacked without Debian's tools.

sources.py    locations of archives: a site's mirror, the host's apt sources, snapshots by date
release.py    the signed index of one archive: signature, suite, Packages
control.py    control files, dependency fields and versions, as Debian Policy defines them
index.py      the packages of several suites, the newest of each
resolve.py    names → all packages that they need, with the reason for each failure
lock.py       the lock of a base, as a table
base.py       `resolve_base`: names → a lock, over the network
fetch.py      each locked package by its sha256
deb.py        one package as a stream
rootfs.py     packages → the tree of one layer
made.py       files that maintainer scripts would create
database.py   dpkg's database, for dpkg-query and scanners
defaults.py   the packages of a base and the rules of its tree, from data/debian.toml
"""
