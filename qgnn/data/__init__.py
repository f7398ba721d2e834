"""Graphs to train on: the embedded one, synthetic ones, those of PyG and OGB by name; features as int8 rows."""

from qgnn.data.datasets import dataset_names, load
from qgnn.data.download import DatasetError
from qgnn.data.embedded import wordnet
from qgnn.data.feature_store import QuantizedFeatureStore
from qgnn.data.generate import synthetic
from qgnn.data.graph_sets import GraphSet, load_graphs
from qgnn.data.neighbor_sampler import NeighborSampler
from qgnn.data.stored_features import FeatureFileError, StoredFeatures, write_features

__all__ = [
    "DatasetError",
    "FeatureFileError",
    "GraphSet",
    "NeighborSampler",
    "QuantizedFeatureStore",
    "StoredFeatures",
    "dataset_names",
    "load",
    "load_graphs",
    "synthetic",
    "wordnet",
    "write_features",
]
