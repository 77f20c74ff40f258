"""The models that workloads train, one family a file. Plain torch modules: nothing here knows of workers or rules."""

from __future__ import annotations

from ebbflow.workloads.models.gpt import GPT
from ebbflow.workloads.models.resnet import ResNet, resnet18
from ebbflow.workloads.models.small import MLP, SmallCNN

__all__ = ["GPT", "MLP", "ResNet", "SmallCNN", "resnet18"]
