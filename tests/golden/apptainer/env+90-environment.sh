#!/bin/sh
# What a definition file built on this image says in %environment comes here.
