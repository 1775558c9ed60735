"""The user's command and the agent on each host. Imports no torch and answers at once."""
