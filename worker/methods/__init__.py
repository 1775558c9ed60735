"""Staleness methods: what a stage's layers read in a forward and in a backward."""
