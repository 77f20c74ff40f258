"""Who computes. Every engine keeps the contract of `base.py`; engines never import each other."""
