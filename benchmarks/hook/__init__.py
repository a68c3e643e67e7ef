"""The parts of benchmarks/hook_h200.py: servers, load, the lake beside them, results."""
