"""All stages of a run in one process: what ``spectrain simulate`` starts."""
