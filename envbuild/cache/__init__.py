"""HTTP requests, downloads with resume, and remembered digests of files."""
