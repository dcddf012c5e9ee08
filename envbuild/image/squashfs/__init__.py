"""Reader and writer of squashfs 4.0 that use no external tool.

Sources: Documentation/filesystems/squashfs.rst and fs/squashfs/squashfs_fs.h of the Linux kernel. `segment` compresses
the files of one layer, `write` composes segments into an image, `read` reads images of any writer.
"""
