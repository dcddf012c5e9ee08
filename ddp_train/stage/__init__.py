"""Bring an image to every node of a job once: node 0 reads the shared file, and nodes pass it on to each other.

Node n gets the image from node (n - 1) // 2, piece by piece while that one still gets it itself; if that one is lost,
from the next one on the way to node 0. A piece ends where its content says so: an image that changed a little shares
most pieces with its predecessor, and they are copied from this node's disk. A job's script carries these modules for
the nodes' own Python, 3.6 or later, because no artifact is on the nodes yet.
"""
