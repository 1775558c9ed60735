"""What all processes agree on: messages, schedules, settings, errors. Imports no torch."""
