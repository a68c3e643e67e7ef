"""The lake's tables: Delta logs with compare-and-swap commits, files with digests, roll-ups.

Only this package knows that they are Delta tables.
"""
