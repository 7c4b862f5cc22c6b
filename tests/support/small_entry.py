"""A registry file of two rows for the tests; DATA is to be replaced by a dataset spec."""

SMALL = """
name = "small"
title = "t"
paper = "p"
kind = "runs"
setting = "s"
labels = ["method"]
metrics = ["client_mean"]
printed_seeds = 3
not_given = []
notes = []
cells = [{ at = ["A"], printed = [[50.0, 1.0]] }, { at = ["B"] }]
[protocol]
preset = "official"
rounds = 3
dataset = "DATA"
backbones = ["random-projection:16"]
scheme = "feature-shift"
args = { shots = 4, tests = 2 }
seeds = "0,1"
set = { lr = 0.1 }
[axes.method]
A = { method = "solo", rounds = 2, set = { batch = 4 } }
B = { method = "nonesuch" }
[[differences]]
of = ["A"]
minus = ["B"]
metric = "client_mean"
printed = 2.0
"""
