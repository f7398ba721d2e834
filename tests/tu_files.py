"""A graph classification set in the raw text files of the TU collection, as small as a test wants it."""

from collections.abc import Sequence
from pathlib import Path


def write_tu(raw: Path, name: str, labels: Sequence[int], *, with_node_labels: bool = True) -> None:
    """Rings of graphs: number ``g`` has ``g % 4 + 3`` nodes, whose label is the number of the graph's class.

    Args:
        raw: The folder to write to.
        name: The prefix of the files.
        labels: The label of each graph.
        with_node_labels: Whether nodes have labels, which become their features.
    """
    raw.mkdir(parents=True)
    classes = sorted(set(labels))
    edges, graph_of, node_labels = [], [], []
    for graph, label in enumerate(labels):
        first, size = len(graph_of) + 1, graph % 4 + 3
        for node in range(size):
            here, there = first + node, first + (node + 1) % size
            edges += [f"{here}, {there}", f"{there}, {here}"]
            graph_of.append(str(graph + 1))
            node_labels.append(str(classes.index(label)))
    files = {"A": edges, "graph_indicator": graph_of, "graph_labels": map(str, labels)}
    if with_node_labels:
        files["node_labels"] = node_labels
    for suffix, lines in files.items():
        (raw / f"{name}_{suffix}.txt").write_text("\n".join(lines) + "\n")
