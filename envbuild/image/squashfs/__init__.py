"""squashfs 4.0, written and read without any tool.

Sources: Documentation/filesystems/squashfs.rst and fs/squashfs/squashfs_fs.h of the Linux kernel.

`segment` compresses the files of one layer, `write` composes segments into an image, `tables` makes the
metadata behind the data, `read` reads images of any writer, `codec` holds the compressors.
"""
