"""A base image from Debian packages: resolved, locked, fetched and unpacked with no tool of Debian.

sources.py    where archives are: a site's mirror, the host's apt sources, snapshots by date
release.py    one archive's signed index: signature, suite, Packages
control.py    control files, dependency fields and versions, as Debian Policy defines them
index.py      the packages of several suites, the newest of each
resolve.py    names → the packages that they need, with the reason for each failure
lock.py       what is locked, as a table
base.py       `resolve_base`: names → a lock, over the network
fetch.py      each locked package by its sha256
deb.py        one package as a stream
rootfs.py     packages → the tree of one layer
made.py       what their scripts would have made
database.py   what dpkg and scanners know them by
defaults.py   the packages of a base and the rules of its tree, from data/debian.toml
"""
