"""What the gradients say: noise and signal, of the whole model or of each layer."""
