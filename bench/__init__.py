"""Benchmarks: ``python -m bench SUITE`` measures and appends records, ``python -m bench report`` reads them."""
