"""The one process that cuts the model, feeds batches, watches the run and decides."""
