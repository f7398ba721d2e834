"""Molecules of MoleculeNet in its raw file, as few as a test wants, and what reads them without rdkit."""

from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.datasets import molecule_net

ELEMENTS = {"C": 6, "N": 7, "O": 8}


def write_freesolv(raw: Path, count: int) -> list[float]:
    """Chains of atoms: number ``m`` has ``m % 4 + 1`` of carbon and ``m % 3`` of oxygen.

    Args:
        raw: The folder to write to.
        count: How many.

    Returns:
        The number that each has: four times its fraction of oxygen.
    """
    raw.mkdir(parents=True)
    chains = ["C" * (m % 4 + 1) + "O" * (m % 3) for m in range(count)]
    numbers = [4 * chain.count("O") / len(chain) for chain in chains]
    lines = [f'"{m},-chain",{chain},{number},0' for m, (chain, number) in enumerate(zip(chains, numbers, strict=True))]
    (raw / "SAMPL.csv").write_text("\n".join(["iupac,smiles,expt,calc", *lines]) + "\n")
    return numbers


def read_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyG's class read such chains without rdkit: of an atom its element and its number of bonds, each one bond."""

    def from_smiles(smiles: str) -> Data:
        size = len(smiles)
        x = torch.zeros(size, 9, dtype=torch.long)
        x[:, 0] = torch.tensor([ELEMENTS[atom] for atom in smiles])
        bonds = torch.stack([torch.arange(size - 1), torch.arange(1, size)])
        edge_index = torch.cat([bonds, bonds.flip(0)], dim=1)
        x[:, 2] = torch.bincount(edge_index[0], minlength=size)
        return Data(x=x, edge_index=edge_index, edge_attr=torch.ones(edge_index.shape[1], 3).long(), smiles=smiles)

    monkeypatch.setattr(molecule_net, "_from_smiles", from_smiles)
