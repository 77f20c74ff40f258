"""Noise and signal of the gradient, for the whole model or for each layer: meters, estimates and averages."""
