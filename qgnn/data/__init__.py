"""Graphs to train on: the embedded one, synthetic ones, and those of PyG and OGB by name."""

from qgnn.data.datasets import dataset_names, load
from qgnn.data.download import DatasetError
from qgnn.data.embedded import wordnet
from qgnn.data.generate import synthetic
from qgnn.data.graph_sets import GraphSet, load_graphs

__all__ = ["DatasetError", "GraphSet", "dataset_names", "load", "load_graphs", "synthetic", "wordnet"]
