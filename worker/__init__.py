"""The process that owns one stage: its layers, its weights and its links to the neighbours."""
