"""The folder that Python finds at its start under `python -m pplab.watch`."""
