"""Graphs to train on: the embedded one, synthetic ones, and those of PyG and OGB by name."""

from qgnn.data.datasets import DatasetError, dataset_names, load
from qgnn.data.embedded import wordnet
from qgnn.data.generate import synthetic

__all__ = ["DatasetError", "dataset_names", "load", "synthetic", "wordnet"]
