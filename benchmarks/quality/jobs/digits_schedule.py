"""Digits with a learning rate that rises during the first epoch and then falls to zero."""

from spectrain.examples.digits import datasets, loss, metrics, model, optimizer

__all__ = ["datasets", "loss", "lr_schedule", "metrics", "model", "optimizer"]

settings = {"epochs": 30, "batch_size": 64, "stages": 8}

EPOCH_UPDATES = 23  # 1,437 images in mini-batches of 64
UPDATES = 30 * EPOCH_UPDATES


def lr_schedule(update: int) -> float:
    """Return the factor; 0 beyond the end, where predictions near the end may look."""
    rising = (update + 1) / EPOCH_UPDATES
    falling = (UPDATES - update) / (UPDATES - EPOCH_UPDATES)
    return max(0.0, min(rising, falling))
