"""What Python finds at its start under `python -m pplab.watch`."""
