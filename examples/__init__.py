"""Job files that come with the package; those here are plain PyTorch and import nothing of ours."""
