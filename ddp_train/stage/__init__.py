"""Bring an image to every node of a job once: node 0 reads the shared file, and nodes pass it on to each other.

The parent of node n is node (n - 1) // 2. A node receives the image from its parent piece by piece, while the parent is
still receiving it; if the parent is lost, it takes the next ancestor. The content decides where a piece ends, so an
image with few changes shares most pieces with its predecessor, and these are copied from this node's disk. A job's
script contains these modules for the nodes' own Python, 3.6 or later, because no artifact is on the nodes yet.
"""
