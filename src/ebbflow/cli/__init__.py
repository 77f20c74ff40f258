"""The command line: one file a verb. Verbs that do not train do not import torch."""
