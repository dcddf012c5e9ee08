"""A base image from Debian packages: resolved, locked, fetched and unpacked without Debian's tools."""
