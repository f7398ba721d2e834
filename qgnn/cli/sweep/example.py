"""What ``qgnn sweep --example`` prints: a short specification that needs no data set but the embedded one."""

TEXT = """\
# How many bits do the weights need, and how many all components? 10 runs.

[sweep]
name = "example"       # results are written to sweeps/example
datasets = ["wordnet"] # embedded; others by name, from --root
models = ["gcn"]
epochs = 10            # left out, the usual number of the data set
seeds = 2              # 0 and 1; or a list

[[grid]]
name = "baseline"
formats = ["fp32"]     # once a data set, model and seed

[[grid]]
name = "formats by component"
formats = ["int8", "int4"]
components = ["weights", "all"]
"""
