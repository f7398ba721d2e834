"""``qgnn sweep``: many runs from one specification, over processes, recorded one by one, resumable."""
