"""Job files that ship with the package; each is plain PyTorch and imports nothing of ours."""
