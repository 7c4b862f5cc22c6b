"""Break the engine and its methods on purpose, and see every law over them fail.

    OMP_NUM_THREADS=1 python tools/break_laws.py [--only LAW] [--jobs N]

A law that cannot fail says nothing. Each row of ``TABLE`` breaks one promise by a replacement in a copy of the package
(never in this checkout), and the law that makes the promise runs there; before, all of them pass on the untouched copy.
Caught means that an assertion of the law fails, or that the package refuses what the law planted (NaN, labels). Any
other exception is a bad mutation. Every law of tests/contract/test_method_laws.py must have a row. Prints a
Markdown table and exits 1 if a mutation survives.

Torch and the like are imported once; each mutation then runs in a fork, in a copy of the tree of its own.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from code_changes import ROOT, changed, copied

CAUGHT = re.compile(
    r" - (AssertionError|assert |Failed: DID NOT RAISE|fedcache\.testing\.law\.LawBroken|fedcache\.errors\.\w+Error)"
)


@dataclass(frozen=True)
class Breakage:
    """In ``file`` below fedcache/ the only ``old`` becomes ``new``; ``test_<law>`` must fail for ``-k select``."""

    law: str
    what: str
    file: str
    old: str
    new: str
    select: str = ""


B = Breakage
CONTEXT = "federate/engine/context.py"
ROUNDS = "federate/engine/run_state.py"
STEPS = "federate/engine/local_training.py"
BATCH = "federate/execution/grid_batch.py"
GRAM = "federate/execution/gram.py"
GRAM_STATES = "federate/execution/gram_states.py"
SAMPLING = "federate/engine/sampling.py"
TIME = "federate/engine/simulated_time.py"
SNAPSHOTS = "federate/engine/snapshots.py"
SCORE = "federate/engine/evaluate.py"
METHODS = "federate/methods/"
CHECKS = "federate/trust/statistic_checks.py"
PIPELINE = "federate/trust/pipeline.py"
SITES = "federate/engines/flower/sites.py"
SERVER_JOB = "federate/engines/flower/server.py"
PLAN = "federate/engines/flower/plan.py"
KEY = "generators([(self.seed, purpose, when, c, *key) for c in self.clients])"
PRIVACY = "federate/trust/privacy.py"
SUMS = 'return {"sum": total, "count": count'
TABLE = (
    B(
        "executions_agree",
        "what a step replaced is lost when a lane comes to rest",
        STEPS,
        "_write_back(full, view, now)\n            now",
        "now",
        "fedavg",
    ),
    B(
        "executions_agree",
        "lanes without rows left keep stepping",
        STEPS,
        "alive = (table > 0).sum(0)",
        "alive = np.full(steps, len(data.n))",
        "solo",
    ),
    B(
        "executions_agree",
        "FedProto's distance is summed over the lanes",
        METHODS + "fedproto.py",
        "(w * known * distance).sum(-1)",
        "(w * known * distance).sum()",
        "fedproto",
    ),
    B(
        "a_grid_point_is_the_run_alone",
        "every point deploys the first one's model",
        BATCH,
        "{k: own_part(t, 0, g) for k, t in tree.items()}",
        "{k: t[0] for k, t in tree.items()}",
        "solo and batched",
    ),
    B(
        "a_grid_point_is_the_run_alone",
        "a point keeps the coordinates of the first",
        GRAM,
        "{n: t[j, :R, :, g] for",
        "{n: t[j, :R, :, 0] for",
        "solo and gram",
    ),
    B(
        "dual_serves_sgd_on_features",
        "FedAvg gives up its coordinates",
        METHODS + "fedavg.py",
        "executions=ON_ROWS",
        'executions=("sequential", "batched")',
    ),
    B(
        "chunks_change_nothing",
        "every client of a chunk sends what its first one does",
        BATCH,
        "full = t.expand(*t.shape[:axis],",
        "full = t.narrow(axis, 0, 1).expand(*t.shape[:axis],",
        "fedavg and batched",
    ),
    B(
        "chunks_change_nothing",
        "draws go by the place in the chunk",
        CONTEXT,
        KEY,
        KEY.replace("c,", "i,")
        .replace("for c in", "for i, c in enumerate(")
        .replace("clients]", "clients)]"),
        "solo",
    ),
    B(
        "the_same_seed_gives_the_same_bits",
        "streams start from the system's entropy",
        CONTEXT,
        "PCG64(key_hash(*key))",
        "PCG64()",
        "fedavg",
    ),
    B(
        "the_same_seed_gives_the_same_bits",
        "noise starts from the system's entropy",
        CONTEXT,
        "seed = key_hash(self.seed,",
        "seed = key_hash(torch.seed(),",
        "fst-cbdg",
    ),
    B(
        "the_callers_torch_state_changes_nothing",
        "gradients stay as the caller left them",
        "process.py",
        "stack.enter_context(torch.inference_mode(False))",
        "pass",
        "fedavg",
    ),
    B(
        "the_callers_torch_state_changes_nothing",
        "autocast of the caller reaches the engine",
        "process.py",
        "if torch.is_autocast_enabled(device):",
        "if not device:",
        "fedavg",
    ),
    B(
        "the_callers_torch_state_changes_nothing",
        "draws are of the caller's default dtype",
        "process.py",
        "torch.set_default_dtype(torch.float32)",
        "pass",
        "fst-cbdg",
    ),
    B(
        "the_callers_torch_state_changes_nothing",
        "the engine computes in the caller's state",
        "federate/engine/run.py",
        "@usual_torch_state()\ndef run_points(",
        "def run_points(",
        "fedavg",
    ),
    B(
        "a_seed_means_the_same_draws_in_every_process",
        "streams are keyed by hash()",
        CONTEXT,
        "hashlib.blake2b(",
        "hashlib.blake2b(str(hash(str(key))).encode() +",
    ),
    B(
        "a_resumed_run_has_the_same_bits",
        "the round is not restored",
        SNAPSHOTS,
        'job.round = int(state.meta["round"])',
        "job.round = 0",
        "fedavg",
    ),
    B(
        "a_resumed_run_has_the_same_bits",
        "the optimiser's state is not saved",
        SNAPSHOTS,
        "for k, t in states[client].items()}",
        'for k, t in states[client].items() if not k.startswith("opt/")}',
        "solo",
    ),
    B(
        "a_resumed_run_has_the_same_bits",
        "who has the text features is forgotten",
        SNAPSHOTS,
        'job.met[state.meta["met"]] = True',
        'job.met[state.meta["met"]] = False',
        "fst-cbdg",
    ),
    B(
        "executions_may_change_between_rounds",
        "draws depend on the execution",
        CONTEXT,
        KEY,
        KEY.replace("c,", "c, self.axes,"),
        "fedavg",
    ),
    B(
        "executions_may_change_between_rounds",
        "stacked Adam is a step ahead",
        STEPS,
        'p["opt/t"] += 1.0',
        'p["opt/t"] += 1.0 + bool(ctx.lead)',
        "adam",
    ),
    B(
        "the_order_of_clients_does_not_matter",
        "sampling goes by place",
        SAMPLING,
        "return sorted_by_name(self.names, self.eligible)",
        "return self.eligible",
        "fedavg",
    ),
    B(
        "the_order_of_clients_does_not_matter",
        "draws go by the client's number",
        ROUNDS,
        "tuple(self.client_names[i] for i in ids)",
        "tuple(str(i) for i in ids)",
        "solo",
    ),
    B(
        "who_is_not_sampled_sends_nothing_and_keeps_its_state",
        "a new state is given to every client",
        ROUNDS,
        "self.states[client] = {k: t.contiguous() for k, t in state.items()}",
        "self.states.update({c: dict(state) for c in range(len(self.training_clients))})",
        "solo and sequential",
    ),
    B(
        "who_is_not_sampled_sends_nothing_and_keeps_its_state",
        "a stacked state reaches the next client too",
        GRAM_STATES,
        "self._trees[client] = self._copied(",
        "self._trees[(client + 1) % 4] = self._trees[client] = self._copied(",
        "solo and batched",
    ),
    B(
        "who_is_not_sampled_sends_nothing_and_keeps_its_state",
        "the broadcast is charged to everybody",
        ROUNDS,
        'self.traffic.down[who] += counts["down"]',
        "self.traffic.down += broadcast_scalars",
        "fedavg",
    ),
    B(
        "no_test_row_is_trained_on",
        "clients train on their test rows too",
        ROUNDS,
        "rows = [self.train_rows(i) for i in ids]",
        "rows = [np.concatenate([self.train_rows(i), self.training_clients[i].test]) for i in ids]",
        "fedncm or solo",
    ),
    B(
        "no_test_row_is_trained_on",
        "central training takes test rows too",
        ROUNDS,
        "rows = np.sort(all_train_rows(clients))\n            self.training_clients",
        "rows = np.sort(np.concatenate([all_train_rows(clients), *(c.test for c in clients)]))\n"
        "            self.training_clients",
        "central",
    ),
    B(
        "no_test_row_is_trained_on",
        "the probe trains on test rows",
        ROUNDS,
        "np.sort(all_train_rows(self.clients))",
        "np.sort(np.concatenate([c.test for c in self.clients]))",
        "flesd-head",
    ),
    B(
        "methods_without_labels_never_read_one",
        "the first soft labels read the labels",
        METHODS + "fst_cbdg.py",
        "u = affine(x, ctx.text)",
        "u = affine(x, ctx.text) + data.labels(data.positions()).unsqueeze(-1)",
        "fst-cbdg",
    ),
    B(
        "methods_without_labels_never_read_one",
        "an unsupervised method declares labels",
        METHODS + "fst_cbdg.py",
        'needs=frozenset({"text"})',
        'needs=frozenset({"text", "labels"})',
        "clip-zs",
    ),
    B(
        "methods_without_labels_never_read_one",
        "every method is handed the labels",
        ROUNDS,
        'if "labels" in method.reads(hp):',
        "if True:",
        "fst-cbdg",
    ),
    B(
        "other_labels_change_nothing",
        "rows are batched in the order of their labels",
        ROUNDS,
        "rows = [self.train_rows(i) for i in ids]",
        "rows = [r[self.data.y.numpy()[r].argsort()] for r in (self.train_rows(i) for i in ids)]",
        "fst-cbdg and batched",
    ),
    B(
        "a_missing_row_is_never_read",
        "padding points at the store's first row",
        "federate/engine/client_data.py",
        "out[len(train) :] = train[0]",
        "out[len(train) :] = 0",
        "fedncm or solo",
    ),
    B(
        "every_execution_that_a_method_names_has_a_case",
        "gram refuses every method",
        GRAM,
        "if load.views > 1:",
        "if load.views > 0:",
    ),
    B(
        "every_method_that_reads_features_alone_stacks",
        "FedAvg gives up the client axis",
        METHODS + "fedavg.py",
        "executions=ON_ROWS",
        'executions=("sequential",)',
        "fedavg",
    ),
    B(
        "every_method_that_reads_features_alone_stacks",
        "convolutions claim a client axis",
        METHODS + "flesd.py",
        'executions=("sequential",)',
        'executions=("sequential", "batched")',
        "flesd",
    ),
    B(
        "a_constant_changes_no_prediction_beyond_rounding",
        "scores are around zero and not the mean",
        METHODS + "fedncm.py",
        "center = sums.sum(0) / count.sum()",
        "center = torch.zeros_like(sums[0])",
        "fedncm or fedcgs",
    ),
    B(
        "columns_that_are_constant_change_no_prediction_beyond_rounding",
        "every feature is thought to vary",
        "heads/ridge.py",
        "return (varies | ~varies.any(-1, keepdim=True)).to(size.dtype)",
        "return torch.ones_like(size)",
        "fed3r",
    ),
    B(
        "no_row_leaves_a_client",
        "all rows are sent",
        METHODS + "fedncm.py",
        SUMS,
        SUMS + ', "x": x',
        "fedncm",
    ),
    B(
        "no_row_leaves_a_client",
        "all rows are sent as one",
        METHODS + "fedncm.py",
        SUMS,
        SUMS + ', "x": x.flatten(-2)',
        "fedncm",
    ),
    B(
        "no_row_leaves_a_client",
        "the first two rows are sent",
        METHODS + "fedncm.py",
        SUMS,
        SUMS + ', "x": x[..., :2, :]',
        "fedncm",
    ),
    B(
        "traffic_adds_up",
        "a client's broadcasts are not added up",
        ROUNDS,
        'self.traffic.down[who] += counts["down"]',
        'self.traffic.down[who] = counts["down"]',
        "fedavg",
    ),
    B(
        "additive_uploads_add_up",
        "a client's sums have norm 1",
        METHODS + "fedncm.py",
        SUMS,
        'return {"sum": total / total.norm(), "count": count',
        "fedncm",
    ),
    B(
        "a_prediction_does_not_see_other_test_rows",
        "scores are centred by the rows beside them",
        METHODS + "common/model.py",
        "return logits(head_of(ctx.hp), {**down, **own}, x)[0]",
        "return logits(head_of(ctx.hp), {**down, **own}, x - x.mean(-2, keepdim=True))[0]",
        "fedavg",
    ),
    B(
        "training_changes_what_is_kept",
        "the server keeps what it has",
        "federate/engine/method.py",
        "return {**server, **up}",
        "return {**up, **server}",
        "fedavg",
    ),
    B(
        "classes_that_lie_apart_are_learnt",
        "scores have the wrong sign",
        METHODS + "common/model.py",
        "return logits(head_of(ctx.hp), {**down, **own}, x)[0]",
        "return -logits(head_of(ctx.hp), {**down, **own}, x)[0]",
        "fedavg",
    ),
    B(
        "all_rows_count_the_same",
        "clients weigh the square of their rows",
        PIPELINE,
        "return self.round.weights.get(client, self.round.rows[client])",
        "return self.round.weights.get(client, self.round.rows[client] ** 2)",
        "fedavg",
    ),
    B(
        "the_counter_agrees_with_the_closed_form",
        "counts of prototypes are free",
        METHODS + "common/prototypes.py",
        '(up["proto"].shape[-1] + 1)',
        'up["proto"].shape[-1]',
        "fedproto",
    ),
    B(
        "the_counter_agrees_with_the_closed_form",
        "text features travel every round",
        ROUNDS,
        "text = np.where(self.met[who], 0, once)",
        "text = np.full(len(who), once)",
        "fst-cbdg",
    ),
    B(
        "traffic_adds_up",
        "only the last client's upload counts",
        ROUNDS,
        "int(of_clients.sum())",
        "int(of_clients[-1:].sum())",
        "fedavg",
    ),
    B(
        "the_parameters_of_the_tables_come_out_of_the_counter",
        "the papers' count holds biases",
        METHODS + "fedavg.py",
        "paper_weights(width, classes)",
        "paper_weights(width, classes) + classes",
        "fedavg",
    ),
    B(
        "all_columns_by_name_are_all_columns",
        "columns are cut backwards",
        "federate/engine/client_data.py",
        "torch.cat(parts, -1)",
        "torch.cat(parts, -1).flip(-1)",
    ),
    B(
        "a_client_with_some_backbones_trains_as_on_a_store_that_has_only_those",
        "backbones are sorted",
        "federate/engine/client_data.py",
        "for first, end in ranges]",
        "for first, end in sorted(ranges)]",
    ),
    B(
        "the_public_set_neither_trains_nor_is_scored_and_everybody_reads_it",
        "the public set trains",
        ROUNDS,
        "np.arange(len(clients)) >= public",
        "np.arange(len(clients)) >= 0",
    ),
    B(
        "everywhere_scores_each_model_on_all_test_rows",
        "models are scored at home",
        SCORE,
        "test = union\n        if test is None:",
        "test = None\n        if test is None:",
    ),
    B(
        "what_evaluation_trains_reads_labels_of_all_training_rows_and_changes_no_run",
        "the probe sees one client",
        ROUNDS,
        "np.sort(all_train_rows(self.clients))",
        "np.sort(all_train_rows(self.clients[:1]))",
    ),
    B(
        "two_clients_by_hand",
        "a stale update is taken against the model of now",
        TIME,
        "base = self.versions[group.version]",
        "base = down",
    ),
    B(
        "two_clients_by_hand",
        "a broadcast is counted again with its upload",
        TIME,
        "frozenset(arrived.keys() - set(began))",
        "frozenset()",
    ),
    B(
        "updates_of_different_ages_share_a_buffer_by_their_rows",
        "clients weigh alike",
        TIME,
        'if rule(name) != "uniform":',
        'if rule(name) != "mean":',
    ),
    B(
        "equal_durations_and_a_buffer_of_all_in_training_are_rounds_to_the_bit",
        "time stands still",
        TIME,
        "self.clock + duration, self._begun",
        "duration, self._begun",
        "sequential",
    ),
    B(
        "a_run_that_goes_on_with_clients_in_training_has_the_same_bits",
        "their models are those of now",
        TIME,
        "[name] = t.to(self.env.device, copy=True)",
        "[name] = self.server[name]",
        "sequential",
    ),
    B(
        "what_a_schedule_keeps",
        "more clients train than may",
        TIME,
        "self.concurrency - len(self._heap)",
        "self.concurrency",
    ),
    B(
        "the_clients_of_a_round",
        "every round samples the same",
        SAMPLING,
        'len(available))\nrng = generator(self.seed, "sampling", *key)',
        'len(available))\n        rng = generator(self.seed, "sampling")',
    ),
    B(
        "a_result_that_is_not_finite_names_round_and_client",
        "NaN is let through",
        ROUNDS,
        "if not floating or is_bounded(t):",
        "if True:",
    ),
    B(
        "accuracies_are_those_of_the_predictions",
        "clients share the first one's predictions",
        SCORE,
        "accuracy = table.tests.shares_right(rows, right)",
        "accuracy = np.full(len(table), known_mean(right[np.searchsorted(rows, table.tests[0])]))",
    ),
    B(
        "classes_are_not_read_from_the_labels",
        "classes are counted in the labels",
        ROUNDS,
        "data.classes, data.x.shape[2], data.x",
        "int(data.y.max()) + 1, data.x.shape[2], data.x",
    ),
    B(
        "the_snapshot_is_not_a_view_of_the_run",
        "snapshots share the run's memory",
        SNAPSHOTS,
        "return t.clone(memory_format=torch.contiguous_format)",
        "return t",
    ),
    B(
        "a_test_row_that_two_clients_hold_counts_once_globally",
        "shared test rows count once per client",
        SCORE,
        "rows = table.tested_by_clients\n",
        "rows = np.sort(np.concatenate([c.test for c in table]))\n",
    ),
    B(
        "the_sum_cannot_be_recovered_from_what_a_real_run_tells",
        "noise comes from a public seed",
        PRIVACY,
        "            return system_normals\n",
        '            return simulated_normals(0, "privacy", self._key, self._seed, round_)\n',
    ),
    B(
        "simulated_noise_is_that_of_one_run_alone",
        "noise is keyed by seed and round alone",
        PRIVACY,
        'self._privacy.seed, "privacy", self._key, ',
        'self._privacy.seed, "privacy", ',
    ),
    B(
        "the_deviation_on_a_sum_is_that_which_epsilon_is_told_for",
        "the multiplier is left out",
        PRIVACY,
        "self.deviation * noise(",
        "self.bound * noise(",
    ),
    B(
        "who_takes_part_in_a_real_run_is_drawn_from_the_system_once_a_round",
        "the sample follows from the seed",
        PRIVACY,
        "if not self._privacy.protects:",
        "if True:",
    ),
    B(
        "no_client_weighs_more_than_its_share_and_no_weight_is_cut_further_than_needed",
        "shares are not capped",
        PIPELINE,
        "np.minimum(n, cap)",
        "n",
    ),
    B(
        "rows_that_are_the_same_five_times_give_no_more_than_one_vote",
        "sums are as large as claims say",
        PIPELINE,
        "len(self._kept) * statistics.median(kept.rows for kept in self._kept)",
        "sum(kept.rows for kept in self._kept)",
        "fed3r and median",
    ),
    B(
        "counts_are_voted_on_like_the_sums_they_belong_to",
        "counts are added up",
        PIPELINE,
        "self._layout(counts=True)",
        "self._layout(counts=False)",
    ),
    B(
        "every_methods_own_uploads_pass_and_malformed_ones_do_not",
        "what is finite is sound",
        "federate/trust/update_validation.py",
        "(t.abs() <= largest(t.dtype)).all()",
        "torch.isfinite(t).all()",
        "fedavg",
    ),
    B(
        "a_claim_that_is_not_believed_costs_that_site_its_place_and_no_other",
        "any number of rows is believed",
        SITES,
        "            if rows > most:",
        "            if False:",
    ),
    B(
        "a_name_is_that_of_the_first_node_and_another_is_refused",
        "a name is the last node's",
        SITES,
        "first.setdefault(member.facts.name, member.node)",
        "first[member.facts.name] = member.node",
    ),
    B(
        "a_fact_outside_its_limits_is_refused_and_named",
        "a truth value is a number",
        SITES,
        "type(value) is int and low",
        "isinstance(value, int) and low",
    ),
    B(
        "claimed_figures_are_left_out_of_means_over_settings",
        "claimed figures are averaged with measured ones",
        "report/find_runs.py",
        "kept = [e for e in found.entries if not e.claimed]",
        "kept = found.entries",
    ),
    B(
        "another_key_does_not_get_a_name_in_a_later_run",
        "a name is for one run",
        SITES,
        "if owners.get(name, member.key) == member.key:",
        "if True:",
    ),
    B(
        "no_upload_of_one_site_ends_a_run_where_nothing_is_said",
        "a malformed upload ends a federation",
        PLAN,
        'on_bad_update=on_bad or "reject"',
        'on_bad_update="fail"',
    ),
    B(
        "what_a_site_holds_is_what_most_of_them_say",
        "the last site is believed",
        SERVER_JOB,
        "Counter(self.outlines.values()).most_common(1)",
        "list(Counter(self.outlines.values()).items())[-1:]",
    ),
    B(
        "what_is_called_a_probability_says_how_often_a_prediction_is_right",
        "scores are not divided",
        "models/predictor.py",
        "scores / self.softmax_temperature).softmax(-1)",
        "scores).softmax(-1)",
        "fed3r",
    ),
    B(
        "a_second_training_finds_nearly_the_temperature_of_the_test_rows",
        "it trains on the rows it is calibrated on",
        "models/calibrate.py",
        "return remaining, removed.distinct",
        "return train, removed.distinct",
    ),
    B(
        "a_class_has_its_own_name_from_the_file_to_the_prediction",
        "predict names the classes in sorted order",
        "models/predictor.py",
        "return self.members[0].facts.classes",
        "return tuple(sorted(self.members[0].facts.classes))",
    ),
    B(
        "a_class_has_its_own_name_from_the_file_to_the_prediction",
        "a file's names are sorted, its codes not",
        "tables/labels.py",
        "return Words(codes, names, declared=True, repeated=repeated)",
        "return Words(codes, tuple(sorted(names)), declared=True, repeated=repeated)",
    ),
    B(
        "seeds_are_paired_by_number",
        "compare pairs seeds by position",
        "report/comparison.py",
        "zip(run.seeds, values",
        "zip(sorted(run.seeds), values",
    ),
    B(
        "a_lead_is_paired_over_seeds_and_else_over_test_rows",
        "the first screen pairs seeds by position",
        "report/comparison.py",
        "theirs = by_seed(other, score_of(other.result, score).per_seed)",
        "theirs = dict(zip(ours, score_of(other.result, score).per_seed, strict=False))",
    ),
    B(
        "every_stream_of_a_method_is_another_with_another_seed",
        "the order of batches ignores the seed",
        CONTEXT,
        KEY,
        KEY.replace("self.seed", "0"),
    ),
    B(
        "every_stream_of_a_method_is_another_with_another_seed",
        "batches come in the order of rows",
        STEPS,
        "order = ctx.rng.permutations(purpose, data.n, epoch)",
        "order = ctx.rng.stack([np.arange(n) for n in data.n])",
    ),
    B(
        "every_stream_of_a_method_is_another_with_another_seed",
        "initial weights ignore the seed",
        CONTEXT,
        "generator(self.seed, purpose, -1, client)",
        "generator(0, purpose, -1, client)",
    ),
    B(
        "every_stream_of_a_method_is_another_with_another_seed",
        "noise ignores the seed",
        CONTEXT,
        "seed = key_hash(self.seed,",
        "seed = key_hash(0,",
    ),
    B(
        "every_stream_of_a_method_is_another_with_another_seed",
        "clients are handed the seed 0",
        ROUNDS,
        "ClientRng(self.seed, self.round, names, axes",
        "ClientRng(0, self.round, names, axes",
    ),
    B(
        "the_clients_of_a_round",
        "a round's clients ignore the seed",
        SAMPLING,
        'len(available))\nrng = generator(self.seed, "sampling", *key)',
        'len(available))\n        rng = generator(0, "sampling", *key)',
    ),
    B(
        "every_scheme_keeps_the_laws_of_partitions",
        "partitions ignore the seed",
        "federate/partition/scheme.py",
        '[self.seed, "partition"',
        '[0, "partition"',
    ),
    B(
        "the_counter_agrees_with_the_closed_form",
        "bytes received count twice",
        ROUNDS,
        '"down_bytes": scalars_received * size',
        '"down_bytes": 2 * scalars_received * size',
    ),
    B(
        "the_counter_agrees_with_the_closed_form",
        "bytes sent count twice",
        ROUNDS,
        '"up_bytes": sizes.prod(1)',
        '"up_bytes": 2 * sizes.prod(1)',
    ),
    B(
        "no_lie_of_one_site_ends_a_method",
        "statistics of rows are not checked",
        "federate/trust/update_validation.py",
        "if statistics:",
        "if False:",
        "fed3r",
    ),
    B(
        "no_lie_that_grows_over_the_rounds_ends_a_method",
        "uploads are not compared",
        PIPELINE,
        "if size > max(safe, FAR_FROM_OTHERS * usual) and not self._simulated(kept):",
        "if False:",
        "feddyn",
    ),
    B(
        "one_huge_upload_of_two_sites_is_left_out",
        "a model may grow to any size",
        ROUNDS,
        "too_large = self._too_large(made)",
        "too_large = {}",
    ),
    B(
        "no_honest_client_is_rejected_for_its_rows",
        "sums are thought to be exact",
        CHECKS,
        "return ROUNDINGS * (self.eps * (self.rows + width) + self.declared.rounding)",
        "return 0.0",
    ),
    B(
        "numbers_that_no_rows_can_give_are_named",
        "sums of the same upload bound no second moments",
        CHECKS,
        "scatter = full - moments.mT @ moments",
        "scatter = full",
    ),
    B(
        "numbers_that_no_rows_can_give_are_named",
        "weights of a mixture sum to anything",
        CHECKS,
        "if float(apart[c]) > checked.eps * (checked.values.shape[-1] + 1):",
        "if False:",
    ),
    B(
        "a_bound_on_rows_names_the_site_whose_sums_are_longer",
        "nobody bounds the length of rows",
        ROUNDS,
        "return min(known, default=None)",
        "return None",
        "fedncm",
    ),
    B(
        "a_sound_upload_that_makes_the_system_singular_is_left_out_and_named",
        "no upload is left out",
        ROUNDS,
        "suspects = pipeline.suspects()[:MOST_SUSPECTS]",
        "suspects = []",
        "fedcgs",
    ),
    B(
        "a_robust_rule_stays_within_three_points_of_an_honest_federation",
        "the server takes the mean",
        PIPELINE,
        'if rule.text == "mean":',
        "if True:",
        "fedncm",
    ),
    B(
        "counts_are_refused_before_any_client_is_trained",
        "counts travel without noise",
        PIPELINE,
        "uploads.items() if t.without_noise)",
        "uploads.items() if False)",
    ),
    B(
        "the_user_says_which_labels_mean_none",
        "a CSV of images has words where other tables have numbers",
        "extract/datasets/image_lists.py",
        "return Words.of(values).typed()",
        "return Words.of(values)",
    ),
    B(
        "the_classes_are_the_values_that_occur_in_order",
        "words that are equal as numbers are one class",
        "tables/words.py",
        "if any(value != round(value) for value in finite):",
        "if True:",
    ),
    B(
        "folders_that_are_all_named_like_splits_are_never_classes",
        "train and test are classes",
        "extract/datasets/folder.py",
        "if None in codes and not two_splits",
        "if codes or not two_splits",
    ),
    B(
        "a_list_of_images_means_the_same_however_it_is_written",
        "backslashes of Windows are part of a name",
        "extract/datasets/image_lists.py",
        'path.replace("\\\\", "/")',
        "path",
    ),
    B(
        "an_image_folder_of_hugging_face_is_read_from_its_tables",
        "the folders train and test are no splits",
        "extract/datasets/image_lists.py",
        "found.append(codes[0])",
        "found.append(0)",
    ),
    B(
        "a_dataset_of_another_program_has_the_same_rows_labels_and_clients",
        "all rows are of the first client",
        "tables/foreign_files.py",
        "np.repeat(np.arange(len(clients), dtype=np.int32), counts)",
        "np.zeros(sum(counts), dtype=np.int32)",
    ),
    B(
        "a_csv_means_the_same_however_it_is_written",
        "a first line sep=; names the columns",
        "tables/table_files.py",
        "return Dialect(named[1], encoding, 1)",
        "return Dialect(named[1], encoding, 0)",
    ),
    B(
        "the_words_for_yes_and_no_are_read_alike",
        "rows marked as test rows are training rows",
        "tables/splits.py",
        "codes[truth] = code",
        "codes[~truth] = code",
    ),
    B(
        "the_words_for_yes_and_no_are_read_alike",
        "rows that no column marks are training rows",
        "tables/splits.py",
        "codes[without] = free[0]",
        "codes[without] = TRAIN",
    ),
    B(
        "a_column_named_like_a_split_that_says_none_stops_every_door",
        "a split that cannot be read is a group",
        "tables/splits.py",
        "if key in groups or not (every or known.any()):",
        "if True:",
    ),
    B(
        "two_arrays_of_one_split_are_joined_with_their_own_columns",
        "arrays of one split share their columns",
        "tables/splits.py",
        "table = tables.setdefault(word, {})",
        "table = tables.setdefault(word.replace('dev', 'val'), {})",
    ),
    B(
        "a_value_of_its_own_in_every_row_is_a_group_only_when_asked_for",
        "sentences are kept as groups",
        "tables/groups.py",
        "10 * len(group.words) > 9 * known",
        "len(group.words) > known",
    ),
    B(
        "the_user_says_which_labels_mean_none",
        "labels that mean none stay classes",
        "tables/labels.py",
        "if word not in no_label_words)",
        "if word not in ())",
    ),
    B(
        "class_names_of_the_file_are_read_by_every_door",
        "class names of Hugging Face are not read",
        "extract/datasets/hf.py",
        "read_others(_table(file, class_names), names)",
        "read_others(_table(file, {}), names)",
    ),
    B(
        "training_and_test_rows_in_one_file_are_read_by_every_door",
        "a split at the end of a name is not seen",
        "tables/splits.py",
        "if head and tail.lower() in SPLIT_WORDS and not _FLAG.fullmatch(rest):",
        "if not tail:",
    ),
    B(
        "no_command_runs_the_code_that_a_model_file_names",
        "a name out of a file is imported",
        "extract/backbones/own_module.py",
        "and not may_be_run(name):",
        "and False:",
    ),
    B(
        "a_column_vector_is_a_column",
        "labels [N, 1] are no labels",
        "tables/words.py",
        "if values.ndim == 2 and values.shape[1] == 1 and",
        "if values.ndim == 3 and",
    ),
    B(
        "every_hint_can_be_typed_as_it_is_printed",
        "a hint has an option that no command has",
        "store/lock.py",
        "`fedcache extract --wait`",
        "`fedcache extract --waiting`",
    ),
    B(
        "every_hint_can_be_typed_as_it_is_printed",
        "a path stands in a hint as it is",
        "store/chunks.py",
        "fedcache verify {place}",
        "fedcache verify {store}",
    ),
    B(
        "every_hint_can_be_typed_as_it_is_printed",
        "a hint names a script that the wheel does not have",
        "runs/store_choice.py",
        "fedcache shard --partition NAME --out DIR   makes client stores.",
        "python tools/x.py makes client stores.",
    ),
)


@cache
def laws() -> dict[str, Path]:
    """Every test function, without its ``test_``, and every public law of methods -> the file that tries it."""
    found = {}
    for node in ast.parse(
        (ROOT / "fedcache/testing/method_laws.py").read_text(encoding="utf-8")
    ).body:
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(d).startswith("law(") for d in node.decorator_list
        ):
            found[node.name] = Path("tests/contract/test_method_laws.py")
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name.removeprefix("test_")] = file.relative_to(ROOT)
    return found


def general_laws() -> set[str]:
    """The laws over the table of methods; each must have a row."""
    return {law for law, file in laws().items() if file.name == "test_method_laws.py"}


HEAVY = (
    "numpy",
    "pytest",
    "safetensors.torch",
    "scipy.stats",
    "sklearn.linear_model",
    "torch",
    "zarr",
)
"""What tests import that no mutation touches; loaded before the forks."""
OUTPUT = "output.txt"
REWRITTEN = "ignore::pytest.PytestAssertRewriteWarning"  # pytest would rewrite the assertions of what is loaded already


@dataclass(frozen=True)
class Verdict:
    """pytest's exit status, and its first failure or its last words."""

    status: int
    output: str


def start(tree: Path, rows: Sequence[Breakage], files: dict[str, Path]) -> int:
    """Run the laws of ``rows`` in the copy at ``tree``, in a fork of this process; returns its id."""
    if child := os.fork():
        return child
    chosen = " or ".join(
        f"(test_{r.law} and ({r.select}))" if r.select else f"test_{r.law}" for r in rows
    )
    options = f"-x -q -rf -p no:cacheprovider -p no:xdist -W {REWRITTEN} --tb=short -k".split()
    with (tree / OUTPUT).open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(tree)
    # The law runs as in a checkout in which this file differs from main.
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(tree),
        "COLUMNS": "300",
        "FEDCACHE_CHANGED": " ".join(f"fedcache/{row.file}" for row in rows),
    }
    sys.path.insert(0, str(tree))
    # A mutation of the same length and second would be read from what is cached.
    sys.dont_write_bytecode = True
    status = 3
    try:
        status = int(pytest.main([*options, chosen, *sorted({str(files[r.law]) for r in rows})]))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def verdict(tree: Path, code: int) -> Verdict:
    """The verdict on a fork that ended with ``code`` of ``os.wait``."""
    output = (tree / OUTPUT).read_text(encoding="utf-8", errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) [^:]+::test_(.*)$", output, re.MULTILINE)
    return Verdict(os.waitstatus_to_exitcode(code), failed[1] if failed else output.strip()[-300:])


def verdicts(
    rows: Sequence[Breakage], trees: list[Path], files: dict[str, Path]
) -> Iterator[Verdict]:
    """The verdict on every mutation, in the order of ``rows``; as many at a time as there are trees."""
    waiting = deque(enumerate(rows))
    running = {}
    done = {}
    for expected in range(len(rows)):
        while expected not in done:
            while trees and waiting:
                number, row = waiting.popleft()
                tree = trees.pop()
                text = (ROOT / "fedcache" / row.file).read_text(encoding="utf-8")
                broken = changed(text, row.old, row.new, row.file)
                (tree / "fedcache" / row.file).write_text(broken, encoding="utf-8")
                running[start(tree, [row], files)] = number, tree, row.file, text
            child, code = os.wait()
            number, tree, file, text = running.pop(child)
            (tree / "fedcache" / file).write_text(text, encoding="utf-8")
            done[number] = verdict(tree, code)
            trees.append(tree)
        yield done.pop(expected)


def main() -> str:
    """What is wrong with laws or mutations; empty when all were caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", metavar="LAW", default="", help="rows whose law's name contains this"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutations at a time")
    given = parser.parse_args()
    only = given.only.removeprefix("test_")
    files = laws()
    rows = [r for r in TABLE if only in r.law] or parser.error(f"no law is called {only}")
    wrong = [f"{law} has no row" for law in sorted(general_laws() - {r.law for r in TABLE})]
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        trees = [copied(Path(folder) / str(job), "fedcache", "tests") for job in range(given.jobs)]
        start(trees[0], rows, files)
        untouched = verdict(trees[0], os.wait()[1])
        if untouched.status:
            sys.exit(f"The laws do not pass on the untouched copy: {untouched.output}")
        print(f"Untouched: {untouched.output.splitlines()[-1]}\n")
        print("| law | mutation | caught by |\n|---|---|---|", flush=True)
        for row, found in zip(rows, verdicts(rows, trees, files), strict=True):
            output = found.output
            if found.status != 1 or not CAUGHT.search(output):
                wrong.append(f"{row.law}: {row.what}: not caught, but {output}")
                output = "NOTHING"
            print(f"| {row.law} | {row.what} | {output.removeprefix(row.law)[:120]} |", flush=True)
    return "\n".join(wrong)


if __name__ == "__main__":
    sys.exit(main() or None)
