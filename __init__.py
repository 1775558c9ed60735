"""SpecTrain: asynchronous pipeline-parallel training with weight prediction.

This file holds the version and nothing else: importing ``spectrain`` must stay cheap, because the
command line does it before every answer.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
