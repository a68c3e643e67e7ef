"""Examples, run from a checkout: `python -m examples.corpus`, `python -m examples.eagle3.train`."""
