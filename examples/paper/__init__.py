"""The six models that SpecTrain's authors trained, as job files; the data are the user's own."""
