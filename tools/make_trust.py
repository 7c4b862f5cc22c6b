"""Make docs/trust.md: run the tests behind every promise, count the cases they tried, and say what was lost.

    OMP_NUM_THREADS=1 python tools/make_trust.py [--full] [--mutate] [--only ID]

--full tries all cases (200 kills, 1,000 flips, ...); without it the numbers of CI. --mutate also removes each
protection in a copy of the package and expects its test to fail; without it the column of an earlier run is kept.
Exits 1 when a test fails or a removed protection goes unnoticed. About ten minutes, with --full an hour, --mutate more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from code_changes import changed

LONGEST = 7200
"""Seconds that a selection of tests may take."""

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "trust.md"
KEPT = ROOT / "docs" / "trust.json"
KILLS = "tests/durability/test_kills.py"
TRAINING_KILLS = "tests/durability/test_training_kills.py"
DAMAGE = "tests/durability/test_damage.py"
FEDERATED = "tests/durability/test_federated.py"

PRIVACY = "tests/federate/trust/test_privacy.py"
PRIVATE = "tests/runs/test_private_runs.py"


@dataclass(frozen=True)
class Promise:
    """What is promised, the tests that hold it, and a way to break it.

    Attributes:
        id: in ``reliability.md``.
        text: for a reader.
        tests: pytest node ids; ``file -k words`` chooses within a file.
        breakage: (file below fedcache/, text, replacement, tests that must fail then); None where the test is its own
            control or nothing in this package protects.
    """

    id: str
    text: str
    tests: tuple[str, ...]
    breakage: tuple[str, str, str, str] | None = None


PROMISES = (
    Promise(
        "D1",
        "An extraction that is killed (-9) at any time resumes to the same bytes",
        (f"{KILLS} -k killed_extractions", "tests/extract/test_extract.py -k killed_writer_left"),
        (
            "store/catalog.py",
            "journal.unlink(missing_ok=True)",
            "pass",
            "tests/extract/test_extract.py -k killed_writer_left",
        ),
    ),
    Promise(
        "D2",
        "A write, fsync or rename that fails, whichever it is, loses nothing that was whole",
        ("tests/store/test_store_faults.py -k failure_at_any_point",),
    ),
    Promise(
        "D3",
        "SIGINT and SIGTERM end with exit 130 and the command that goes on",
        (f"{KILLS} -k signals",),
    ),
    Promise(
        "D6",
        "Two signals to the whole process group end an extraction within 5 seconds; no process is left",
        (f"{KILLS} -k two_signals", "tests/extract/test_workers.py"),
        (
            "extract/workers/processes.py",
            "                self.check()\n",
            "                pass\n",
            "tests/extract/test_workers.py -k middle",
        ),
    ),
    Promise(
        "D4",
        "train and grid, killed (-9), resume to the same result.json",
        (f"{TRAINING_KILLS} -k killed_training",),
        (
            "federate/engine/snapshots.py",
            'job.round = int(state.meta["round"])',
            "job.round = 0",
            f"{TRAINING_KILLS} -k killed_training",
        ),
    ),
    Promise(
        "D7",
        "Private training, ingest, partition and gc, killed (-9), lose nothing, and gc names what they leave",
        (
            f"{TRAINING_KILLS} -k killed_commands",
            "tests/runs/test_garbage.py -k 'killed_ingest or goes_whole'",
        ),
        (
            "store/catalog.py",
            "if journal.exists():\nyield (journal,",
            "if False:\n                yield (journal,",
            "tests/runs/test_garbage.py -k killed_ingest",
        ),
    ),
    Promise(
        "D9",
        "Training killed (-9) while models are saved has no result or a result with whole models, and ends in the same bits",
        ("tests/durability/test_model_kills.py",),
        (
            "runs/loop.py",
            "before=lambda result: seal(self.directory.path, self.identity.digest, digest_of(result), numbers, self.kept),",
            "before=lambda _: None,",
            "tests/durability/test_model_kills.py",
        ),
    ),
    Promise(
        "D8",
        "What a command of a federation has started ends with it, killed (-9) or not, and gc names what is left",
        (
            "tests/federate/engines/test_flower_processes.py",
            "tests/runs/test_garbage.py -k leftovers_are",
        ),
        (
            "federate/engines/flower/processes.py",
            "prctl(1, signal.SIGKILL)",
            "prctl(1, 0)",
            "tests/federate/engines/test_flower_processes.py -k killed",
        ),
    ),
    Promise(
        "D5",
        "A full disk is exit 6 with what is needed and free; what was written stays",
        (
            f"{KILLS} -k fills_up",
            "tests/store/test_store_faults.py -k full_disk",
            "tests/store/test_store_exchange.py -k full_disk",
            "tests/store/test_store_memory.py -k full_disk",
        ),
    ),
    Promise(
        "C1",
        "A flipped bit anywhere in a store is found, and never read as a number",
        (
            f"{DAMAGE} -k flips",
            "tests/store/test_store_check.py -k flipped_bit",
            "tests/store/test_store_memory.py -k flipped_bit",
        ),
        (
            "store/chunks.py",
            "return int(google_crc32c.value(",
            "return 0 * int(google_crc32c.value(",
            f"{DAMAGE} -k flips",
        ),
    ),
    Promise(
        "C2",
        "Truncated, grown, zeroed, deleted and swapped files are found",
        (f"{DAMAGE} -k every_kind", "tests/store/test_store_check.py -k cut_grown"),
        (
            "store/chunks.py",
            "if crc is not None and found != crc:",
            "if False:",
            f"{DAMAGE} -k every_kind",
        ),
    ),
    Promise("C3", "Stores of every released format open", ("tests/store/test_store_layout.py",)),
    Promise(
        "C4",
        "Any bytes in manifest, journal, partition or configuration are refused in words",
        (
            "tests/store/test_store_hostile.py",
            "tests/federate/partition/test_partition_file.py",
            "tests/federate/partition/test_array_form.py",
            "tests/test_config_hostile.py",
        ),
        (
            "store/files.py",
            "if type(value) is not dict or canonical != body:",
            "if False:",
            "tests/store/test_store_hostile.py",
        ),
    ),
    Promise(
        "C5",
        "A checkpoint or finished seed is read whole and for its own run, or the seed begins again and says so",
        (
            "tests/store/test_sealed.py",
            "tests/runs/test_run_directory.py",
            "tests/runs/test_runs.py -k 'finished or unfinished or directory'",
        ),
        (
            "store/files.py",
            'if seal["what"] != what:',
            "if False:",
            "tests/runs/test_run_directory.py -k another_seed_or_run",
        ),
    ),
    Promise(
        "C6",
        "What a home remembers (digests, recipes, the last dataset) is forgotten or refused when it is damaged",
        ("tests/extract/test_digests.py",),
        (
            "store/files.py",
            "if raw[-_TAIL:] != _BEFORE + sha256_hex(body).encode() + _AFTER:",
            "if False:",
            "tests/extract/test_digests.py -k 'flipped or memories'",
        ),
    ),
    Promise(
        "C7",
        "A site goes on only from the state that it wrote itself for that run and round",
        ("tests/federate/engines/test_flower_parts.py -k 'not_what_it_wrote'",),
        (
            "store/files.py",
            'if seal["tensors"] != _tensors_digest(tensors):',
            "if False:",
            "tests/federate/engines/test_flower_parts.py -k not_what_it_wrote",
        ),
    ),
    Promise(
        "C8",
        "After a long story no file of a home can be changed so that a command gives another figure without a word",
        ("tests/durability/test_home.py",),
        (
            "runs/directory.py",
            "if digest_of(found) != claimed:",
            "if False:",
            "tests/durability/test_home.py -k 'digit and result'",
        ),
    ),
    Promise(
        "C9",
        "A saved model is whole, of its own run and seed, or refused; a save that fails leaves a run without a result",
        (
            "tests/models/test_run_models.py -k 'flipped or fails or without_a_model or weights'",
            "tests/federate/engines/test_site_models.py -k changed",
        ),
        (
            "runs/run_models.py",
            'if not path.is_file() or file_sha256(path) != listed["sha256"]:',
            "if False:",
            "tests/models/test_run_models.py -k flipped",
        ),
    ),
    Promise(
        "P1",
        "Four writers of one store: one writes, the others wait or are told; nothing is lost",
        (f"{KILLS} -k four_writers",),
        (
            "store/lock.py",
            "        lock.acquire()\n    except Timeout as error:",
            "        pass\n    except Timeout as error:",
            f"{KILLS} -k four_writers",
        ),
    ),
    Promise(
        "I1",
        "Odd and broken images are converted as documented or quarantined with the reason",
        ("tests/extract/test_images.py",),
    ),
    Promise(
        "I2",
        "Bombs are refused before they unpack",
        (
            "tests/extract/datasets/test_datasets_archives.py -k bomb",
            "tests/extract/test_images.py -k bomb",
        ),
    ),
    Promise(
        "S1",
        "Checkpoints and embedding files never run code",
        (
            "tests/extract/datasets/test_plain_pickle.py",
            "tests/extract/backbones/test_backbones_checkpoints.py",
            "tests/store/test_store_exchange.py -k hostile",
        ),
    ),
    Promise(
        "S2",
        "No module but the audited one opens what can run code",
        ("tests/project/test_gates.py", "tests/project/test_imported_code.py"),
    ),
    Promise(
        "S3",
        "Archives with links, devices or paths that lead out are refused",
        ("tests/extract/datasets/test_datasets_archives.py -k 'hostile or links'",),
    ),
    Promise(
        "S4",
        "Names with /, .., NUL, 300 characters or script stay names, or are refused",
        (
            "tests/extract/datasets/test_datasets_folder.py -k odd_names",
            "tests/extract/datasets/test_datasets_archives.py -k 'hostile or links'",
            "tests/report/test_partition_dots.py -k drawn_as_they_are",
            "tests/commands/test_refusals.py -k 'ignored_or_misread'",
        ),
    ),
    Promise(
        "S6",
        "No printed name commands a terminal, a page or a spreadsheet: control and bidi characters, formulas",
        ("tests/commands/test_hostile_names.py",),
        (
            "parsing.py",
            "return hidden.sub(_number, text)",
            "return text",
            "tests/commands/test_hostile_names.py -k no_command",
        ),
    ),
    Promise(
        "S7",
        "Links out of a dataset's folder are not read unless asked for; no list quotes what a file holds",
        (
            "tests/extract/datasets/test_datasets_folder.py -k 'links_out or becomes_a_link or link_itself'",
            "tests/extract/datasets/test_datasets_papers.py -k link_out",
            "tests/extract/test_extract.py -k link_out",
            "tests/extract/test_images.py -k no_image",
        ),
        (
            "extract/datasets/tree.py",
            "return real != within and not",
            "return False and not",
            "tests/extract/datasets/test_datasets_folder.py -k 'links_out or becomes_a_link'",
        ),
    ),
    Promise(
        "S8",
        "Files come from encrypted addresses or with a published checksum; none leads on to an unencrypted one",
        (
            "tests/extract/datasets/test_datasets_pull.py -k 'checksum or leads_on or sha256 or published_one'",
        ),
        (
            "extract/datasets/download.py",
            'if not encrypted and (req.type == "https" or not _may_be_plain(newurl, known)):',
            "if False:",
            "tests/extract/datasets/test_datasets_pull.py -k encrypted_address_that_leads",
        ),
    ),
    Promise(
        "S9",
        "An image reaches a page only where it is asked for, as the row it is, as pixels alone, and never of a private run",
        ("tests/report/test_mistakes.py",),
        (
            "report/page.py",
            "    if private:\n",
            "    if False:\n",
            "tests/report/test_mistakes.py -k private",
        ),
    ),
    Promise(
        "S5",
        "No test reaches another machine; every test runs under the guard",
        ("tests/project/test_gates.py -k another_machine",),
        (
            "../tests/conftest.py",
            'guarded("connect")\n',
            "pass\n",
            "tests/project/test_gates.py -k another_machine",
        ),
    ),
    Promise(
        "F1",
        "A malformed upload is refused with client and round; the model stays finite",
        ("tests/federate/trust/test_update_validation.py",),
        (
            "federate/trust/update_validation.py",
            "return bool((t.abs() <= largest(t.dtype)).all())",
            "return True",
            "tests/federate/trust/test_update_validation.py -k own_uploads",
        ),
    ),
    Promise(
        "F2",
        "Robust rules stay within their published bounds under every attack",
        ("tests/federate/trust/test_robust_rules.py",),
        (
            "federate/trust/robust_rules.py",
            "return V.sort(0).values[count : len(V) - count].mean(0)",
            "return V.mean(0)",
            "tests/federate/trust/test_robust_rules.py -k no_attack",
        ),
    ),
    Promise(
        "F3",
        "20 % of clients that flip signs x 10 break the mean, and no robust rule by more than 3 points",
        (f"{FEDERATED} -k sign_flippers",),
        (
            "federate/trust/robust_rules.py",
            "return (ordered[(m - 1) // 2] + ordered[m // 2]) / 2",
            "return V.mean(0)",
            f"{FEDERATED} -k 'sign_flippers and fedavg'",
        ),
    ),
    Promise(
        "F4",
        "NaN, Inf and overflowing features are refused or left out with their row numbers",
        (
            "tests/store/test_store_exchange.py -k not_finite",
            "tests/contract/test_method_laws.py -k missing_row",
        ),
    ),
    Promise(
        "F5",
        "A claimed number of rows moves no robust rule by more than 3 points, and costs nobody else a place",
        (
            "tests/federate/engines/test_site_claims.py -k 'claim or limit or mean or name'",
            "tests/federate/trust/test_weights.py",
        ),
        (
            "federate/engines/flower/sites.py",
            "            if rows > most:",
            "            if False:",
            "tests/federate/engines/test_site_claims.py -k 'not_believed'",
        ),
    ),
    Promise(
        "F6",
        "Whatever a site says or sends is taken for what it is, or refused: no site can stop a server",
        (
            "tests/federate/engines/test_site_claims.py -k 'whatever or outside or refusal or holds or class_text'",
            "tests/federate/engines/test_flower_parts.py -k 'gate_stands or no_upload_of_one'",
            "tests/federate/engines/test_site_claims.py -k 'differs or silent or waited'",
        ),
        (
            "federate/engines/flower/sites.py",
            "return type(value) is int and low <= value <= high",
            "return True",
            "tests/federate/engines/test_site_claims.py -k outside",
        ),
    ),
    Promise(
        "F9",
        "No lie of one site of six ends a federation; numbers that no rows can give are rejected by name",
        (
            "tests/federate/engines/test_lying_sites.py",
            "tests/federate/trust/test_statistic_checks.py",
        ),
        (
            "federate/trust/update_validation.py",
            "if why is None and statistics:",
            "if False:",
            "tests/federate/engines/test_lying_sites.py -k 'ends_a_method and fedcgs'",
        ),
    ),
    Promise(
        "F7",
        "The name of a site belongs to its key in all runs of a server; another key that claims it is refused",
        ("tests/federate/engines/test_site_names.py",),
        (
            "federate/engines/flower/site_names.py",
            "{**keys, **known}",
            "{**known, **keys}",
            "tests/federate/engines/test_site_names.py -k 'first_key'",
        ),
    ),
    Promise(
        "F8",
        "What sites score themselves is marked where it is shown, and not mixed with what was measured",
        ("tests/report/test_claimed.py",),
        (
            "runs/run.py",
            "return federation is not None and",
            "return federation is None and",
            "tests/report/test_claimed.py -k 'unless_it_says'",
        ),
    ),
    Promise(
        "R1",
        "The same seed gives the same bits; executions, threads, order, grids and resumes give the same result",
        (
            "tests/contract/test_method_laws.py -k 'same_seed or resumed or executions or order_of or run_alone'",
            "tests/federate/engine/test_stream_keys.py -k every_process",
            f"{FEDERATED} -k threads",
            "tests/federate/execution/test_memo.py -k runs_alone",
            "tests/grids/test_grid.py -k 'processes or stopped'",
        ),
    ),
    Promise(
        "R3", "Fed3R on any partition is the central ridge", (f"{FEDERATED} -k central_ridge",)
    ),
    Promise("R4", "200 rounds keep memory and descriptors flat", (f"{FEDERATED} -k two_hundred",)),
    Promise(
        "R5",
        "A run's own test rows, evaluated with its saved model, give the stored accuracy; classes are matched by name",
        ("tests/commands/test_evaluate_answers.py", "tests/models/test_evaluate.py"),
        (
            "models/evaluate.py",
            "return np.array([number.get(c, -1) for c in names] + [-1], np.int64)[label]",
            "return label",
            "tests/models/test_evaluate.py -k matched_by_name",
        ),
    ),
    Promise(
        "R7",
        "The images of a run's test rows, given to predict as files, have the stored accuracy to the last digit",
        (
            "tests/models/test_digits_predictions.py",
            "tests/models/test_run_models.py -k 'images_give or batches_of'",
        ),
        (
            "extract/how.py",
            'if computed.get("device") != resolve_device(config.device).kind:',
            "if True:",
            "tests/models/test_run_models.py -k batches_of",
        ),
    ),
    Promise(
        "R6",
        "A client of a run, personalised from its own rows, gets the very model it had where nothing else decides it",
        ("tests/models/test_personalise.py", "tests/commands/test_personalise_answers.py"),
        (
            "models/personalise.py",
            "rng=replace(ctx.rng, round=number)",
            "rng=ctx.rng",
            "tests/models/test_personalise.py -k very_model",
        ),
    ),
    Promise(
        "R8",
        "An exported model gives what predict gives, where fedcache is not installed: scores to 1e-4 of the largest and "
        "probabilities to that over the temperature, beyond the rounding that its card measures, a linear head's "
        "estimator to 1e-6",
        (
            "tests/models/test_export_agreement.py",
            "tests/models/test_export_formats.py",
            "tests/models/test_export.py",
        ),
        (
            "models/export/program.py",
            "parts[place] = parts[place].half().float()",
            "parts[place] = parts[place].float()",
            "tests/models/test_export.py -k folder_classifies",
        ),
    ),
    Promise(
        "R10",
        "fc.load_model gives the model of the run, client and seed that are asked for: the stored accuracy to the last digit",
        ("tests/models/test_python_model.py", "tests/models/test_python_evaluate.py"),
        (
            "runs/predict_run.py",
            "seed_word = str(seed)",
            "seed_word = None",
            "tests/models/test_python_model.py -k ensemble",
        ),
    ),
    Promise(
        "R11",
        "FedClassifier predicts what the engine's own run predicts, and passes every check of scikit-learn",
        ("tests/models/test_fed_classifier.py",),
        (
            "models/fed_classifier.py",
            "out = run(spec, hp)",
            "out = run(spec, method.resolve(self.preset, {}))",
            "tests/models/test_fed_classifier.py -k engine_predicts",
        ),
    ),
    Promise(
        "R9",
        "Models that hold a client's training rows one by one are named, found by what each method keeps",
        ("tests/models/test_export.py -k rows",),
        (
            "report/methods/facts.py",
            "if len(seen) > 1))",
            "if len(seen) > 9))",
            "tests/models/test_export.py -k documentation_names",
        ),
    ),
    Promise(
        "A1",
        "Epsilon, of seeds together too, is within 1 % of a closed form and of a convolution of our own",
        (f"{PRIVACY} -k epsilon",),
        (
            "federate/trust/privacy.py",
            "rounds=rounds * seeds",
            "rounds=rounds",
            f"{PRIVACY} -k composes",
        ),
    ),
    Promise(
        "A2",
        "Under --secure a site sends no number beyond the bound, and the sum is the pooled sum of one process",
        ("tests/federate/engines/test_masking.py",),
        (
            "federate/engines/flower/masking.py",
            "if not largest <= self.bound:",
            "if False:",
            "tests/federate/engines/test_masking.py -k beyond",
        ),
    ),
    Promise(
        "C10",
        "A run knows its partition by its rows: a name that other rows were given since is refused",
        ("tests/runs/test_partitions.py -k 'other_rows or know_its'",),
        (
            "runs/partitions.py",
            "if not loaded.digest.startswith(pinned):",
            "if False:",
            "tests/runs/test_partitions.py -k 'other_rows or know_its'",
        ),
    ),
    Promise(
        "A10",
        "No two sums of --secure differ by what one site sent: sites and seeds that would make them are refused",
        ("tests/federate/engines/test_masking.py -k difference",),
        (
            "federate/engines/flower/plan.py",
            "if a_round < self.sites:",
            "if False:",
            "tests/federate/engines/test_masking.py -k difference",
        ),
    ),
    Promise(
        "A3",
        "Noise that protects cannot be worked out from what a run tells, and no two runs or rounds share any",
        (f"{PRIVACY} -k 'noise or recovered or takes_part'", f"{PRIVATE} -k 'two_real or stopped'"),
        (
            "federate/trust/privacy.py",
            "            return system_normals\n",
            '            return simulated_normals(0, "privacy", self._key, self._seed, round_)\n',
            f"{PRIVACY} -k recovered",
        ),
    ),
    Promise(
        "A4",
        "A simulation says so wherever its epsilon is told, and shares noise with no other run",
        (f"{PRIVATE} -k simulation", f"{PRIVACY} -k one_run_alone"),
        (
            "federate/trust/privacy.py",
            'self._privacy.seed, "privacy", self._key, ',
            'self._privacy.seed, "privacy", ',
            f"{PRIVACY} -k one_run_alone",
        ),
    ),
    Promise(
        "A5",
        "What private runs spend is written down before it is told, and adds up over seeds, points and repeats",
        (f"{PRIVATE} -k 'composes or ledger or processes or stopped'",),
        (
            "store/files.py",
            'if (content.pop(NUMBER, 0), content.pop(BEFORE, "")) != (number, sha256_hex(before)):',
            'if (content.pop(NUMBER, 0), content.pop(BEFORE, "")) is None:',
            f"{PRIVATE} -k ledger_but",
        ),
    ),
    Promise(
        "A11",
        "A run that is started several times at once is trained once: one result, of a private run one entry for each seed",
        (
            "tests/runs/test_run_owner.py",
            f"{PRIVATE} -k 'others_wait or again_and_killed'",
            "tests/durability/test_private_starts.py",
        ),
        (
            "runs/directory.py",
            "    locked = folders[:1]\n",
            "    locked = list[Path]()\n",
            "tests/runs/test_run_owner.py",
        ),
    ),
    Promise(
        "A8",
        "A ledger of privacy that has lost a line, in the middle or at its end, is refused",
        (f"{PRIVATE} -k 'ledger_but or lost_its_last or is_gone'",),
        (
            "runs/privacy_ledger.py",
            "if lines not in (count, count + 1):",
            "if False:",
            f"{PRIVATE} -k lost_its_last",
        ),
    ),
    Promise(
        "A9",
        "Going on from an older state of a private run, or one of which nothing is known, counts as another release",
        (f"{PRIVATE} -k 'older_state or not_known'",),
        (
            "runs/loop.py",
            "if released and reported is not None and reported <= rounds:",
            "if True:",
            f"{PRIVATE} -k 'older_state or not_known'",
        ),
    ),
    Promise(
        "A6",
        "What epsilon does not cover is refused unless it is allowed by name, and nobody is told who took part",
        (
            f"{PRIVACY} -k 'by_name or counts_are or secret or methods_info'",
            f"{PRIVATE} -k 'asked_for or tells_who or single_clients'",
            "tests/federate/trust/test_weights.py -k names_nobody",
        ),
        (
            "runs/results.py",
            '"clients": None if secret else list(r.clients)',
            '"clients": list(r.clients)',
            f"{PRIVATE} -k tells_who",
        ),
    ),
    Promise(
        "A7",
        "A private run that is killed (-9) makes no told round again, and what it spent is written down",
        ("tests/durability/test_private_kills.py",),
        (
            "runs/loop.py",
            "        self.save_checkpoint(seed, snapshot())\n        keep_reported",
            "        keep_reported",
            "tests/durability/test_private_kills.py",
        ),
    ),
    Promise(
        "E1",
        "Every command answers --help, wrong flags and missing files in one sentence",
        ("tests/commands/test_cli.py", "tests/commands/test_refusals.py"),
    ),
    Promise(
        "E2",
        "Every exit code comes out of the command line, and every error has a hint",
        ("tests/contract/test_exit_codes.py",),
        (
            "extract/backbones/weights.py",
            "fedcache backbones pull {shell_word(backbone.name)};  with a file:  {by_file}.",
            "there.",
            "tests/contract/test_exit_codes.py -k weights",
        ),
    ),
)


def run(tests: tuple[str, ...], tree: Path, full: bool) -> tuple[int, int, int, str]:
    """(tests passed, cases tried, failed, first failure) of some selections in a checkout."""
    passed = cases = failed = 0
    said = ""
    for selection in tests:
        file, _, words = selection.partition(" -k ")
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "junit.xml"
            line = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-o",
                "junit_family=legacy",
                f"--junitxml={out}",
                file,
            ]
            line += ["-k", words.strip("'")] if words else []
            env = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(
                    filter(None, (str(tree), os.environ.get("PYTHONPATH")))
                ),
            }
            env |= {"FEDCACHE_CASES": "full"} if full else {}
            try:
                done = subprocess.run(
                    line,
                    cwd=tree,
                    env=env,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=LONGEST,
                )
                told = (done.stdout + done.stderr).strip()[-300:]
            except subprocess.TimeoutExpired:
                # without a protection against a hang, tests fail and pytest never ends
                told = f"no end within {LONGEST} s"
            if not out.exists():
                return passed, cases, failed + 1, told
            for case in ElementTree.parse(out).getroot().iter("testcase"):
                if case.find("skipped") is not None:
                    continue
                if (wrong := case.find("failure")) is not None or (
                    wrong := case.find("error")
                ) is not None:
                    failed += 1
                    said = said or f"{case.get('name')}: {(wrong.get('message') or '')[:200]}"
                    continue
                passed += 1
                drawn = [
                    int(p.get("value", "1"))
                    for p in case.iter("property")
                    if p.get("name") == "cases"
                ]
                cases += sum(drawn) if drawn else 1
    return passed, cases, failed, said


def mutate(promise: Promise) -> str:
    """What became of a test whose protection was removed: 'fails, as it must', or why that is not known."""
    if promise.breakage is None:
        return ""
    file, old, new, tests = promise.breakage
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for part in ("fedcache", "tests", "tools"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        target = tree / "fedcache" / file
        text = target.read_text(encoding="utf-8")
        target.write_text(changed(text, old, new, file), encoding="utf-8")
        *_, failed, _ = run((tests,), tree, full=False)
        if failed:
            return "seen to fail"
        return "NOT NOTICED"


def page(rows: dict[str, dict[str, object]], when: str) -> str:
    """The text of docs/trust.md."""
    lines = [
        "# Trust",
        "",
        "Made by `tools/make_trust.py`; edit the tool or the tests, not this page. " + when,
        "",
        "| | promise | cases | lost | protection removed | tests |",
        "|---|---|---|---|---|---|",
    ]
    for promise in PROMISES:
        if row := rows.get(promise.id):
            tests = ", ".join(f"`{t.split('/')[-1]}`" for t in promise.tests)
            lines.append(
                f"| {promise.id} | {promise.text} | {row['cases']:,} | {row['lost']} | {row['broken']} | {tests} |"
            )
    return "\n".join([*lines, "", WORDS.replace("LEAVES", leaves())])


def leaves() -> str:
    """What leaves a client, by kind, as a table over all methods: nothing first, what few send last."""
    from fedcache.federate.methods import METHODS
    from fedcache.report.methods.facts import leaving

    found: dict[tuple[str, str], list[str]] = {("nothing", "-"): []}
    for method in METHODS.values():
        parts = leaving(method)
        for kind in dict.fromkeys((p.what, p.tells) for p in parts) or [("nothing", "-")]:
            found.setdefault(kind, []).append(method.name)
    first, *others = found.items()
    rows = [first, *sorted(others, key=lambda item: -len(item[1]))]
    lines = ["| what leaves a client in a round | what it tells | methods |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {what} | {tells} | {', '.join(names)} |" for (what, tells), names in rows)]
    )


WORDS = """\
Cases are those that ran: a parametrised test counts once for each of its parameters, a test that draws its
cases says how many it drew. *Protection removed* tells whether the same test was seen to fail in a copy of the
package without the line that protects.

## What is trusted
Weights, datasets, archives, files of embeddings, uploads and configuration are not. Your own `FEDCACHE_HOME` is
trusted against code, not against damage.

## Files that are read back
Everything that fedcache writes and reads again is sealed: a digest over its bytes, and over what the file is where two
whole files could be exchanged (`store/files.py`).

| file | sealed by | when it is not what was written |
|---|---|---|
| `stores/*.zarr/manifest.json`, journals, `history.jsonl` | their own digest, line by line | refused (exit 5), `repair` |
| chunks, samples, text features, partitions of a store | the manifest: a checksum or digest of each | refused (exit 5), `repair` |
| `runs/*/result.json` | its own digest, and the digest of its run | refused (exit 5), left out of reports; `--fresh` |
| `runs/*/rounds.jsonl`, `partition-*` | digests in `result.json` | likewise |
| `runs/*/config.toml` | finished: digests in `result.json` and, with the places in it, `files.json`; unfinished: it is yours | `--config` refuses it |
| `runs/*/files.json`, `measured.json` | seal for the run | the other digests serve; the times are lost, with a warning |
| `runs/*/checkpoint-*.safetensors`, `seed-*.json` | seal for run and seed | the seed begins again, with a warning |
| `runs/*/states-*.table` | digests of its rows in the checkpoint | likewise |
| `runs/*/models/seed-*.safetensors` | seal, and sha256 in `models.json` | refused (exit 5); `--fresh` trains it again |
| `runs/*/models/models.json` | seal for the run, with the digest of the result | likewise |
| `flower/*/models/*.safetensors` | seal | refused (exit 5) |
| `flower/*/*/*/after-*.safetensors` | seal for store, client, run and round | the site refuses; the round goes on without it, and the result says so |
| `flower/server-*/names.json` | seal | refused (exit 5): restored, or removed, and names are those of the next keys |
| `digests/*.json`, `recipes/*.json` | seal for what is remembered | forgotten and made again |
| `privacy.jsonl`, `privacy-count.json` | its own digest, line by line, the line before, and how many there are | refused (exit 5); runs with noise that it lacks are named |
| `privacy-rounds/*.json` | seal for run and seed | the run goes on, and counts as another release |
| `runs/*/tags.json`, `pruned.json` | seal for the run | refused (exit 5) where the run or the tag is asked for; `runs list` warns and says what to remove |
| `runs/search-*/trials.jsonl` | its own digest, line by line, and the line before | a torn last line is cut off and its trial made again; else refused (exit 5): removed, and the same command reads the stored runs |
| `runs/search-*/study.journal` | written anew for Optuna's own tools, never read | - |
| `grids/*.jsonl` | its own digest, line by line, and the line before | the page of grids names the damaged record; no run depends on it |
| `last.json` | seal | commands that leave the dataset out refuse (exit 5) |
| `weights/*` | imported: seal; all: compared with their digest, part of every recipe, when they are loaded | refused (exit 5) |
| `data/*` | the digest of their content names the store made of them | another store, which says what is new |
| `outputs/*.json` | seal | a note of an `-o` file that is being written, so that `gc` finds what a killed command left; removed |
| `flower/keys/*`, logs, `stores/*/locks/*` | - | keys no longer fit each other and nobody connects; the others decide nothing |
| `flower/server-*`, `flower/site-*`: Flower's database of nodes and runs, apps, logs | - | Flower's own; kept for the next start until you remove them |

A seal is a digest and no signature: who can write into your home can seal what he likes. Sealed files of a release that
did not seal them count as missing. `tools/attack_home.py` changes files of a home one by one and reads them again.

A repeated `train` or `grid` finds its inputs, computes the run's digest from them, and reads and checks the stored
result. Digests of large files are remembered by path, size, modification time and inode. If bits rot without a change of
these, `fedcache verify` or the next command that reads them finds it.

## What leaves a client
`fedcache methods info NAME` lists the tensors that a method sends, with their shapes.

LEAVES

Heads, gradients, prototypes and
statistics are made of the client's rows and tell of them: a mean over one row is that row, and the gradient of
a linear head on one row is its feature times a number (`examples/invert_head.py` does it). Caching features and
training heads is not privacy.

## Code and packages
`make audit` runs bandit over the package and pip-audit over what is installed. Where no advisories can be had
pip-audit audits nothing and calls that success; the command prints how many packages were really audited.

## Uploads
Every upload of every engine and execution passes update validation (`federate/trust/update_validation.py`): it is
compared with what the method declares (`Method.uploads`: names, shapes, types, which tensors count rows), and its
numbers must be finite, and its counts whole and no more than the client's rows. A site must say that it answers the
current round. What it sends under those words can still be the numbers of an earlier round: fedcache does not detect
such a replay (fedavg .944 -> .910 with one of six sites), and a robust rule bounds it like any other lie.
`--on-bad-update fail` ends the run and names client and round, `reject` goes on without it and counts it in the records.
In one process `fail` is the default: such an upload is a bug of a method, or an attack that is studied. Over sites it is
`reject`, so that no site ends a run for the others: the site is named in the log and in `federation.missed` of the result,
and `--quorum` says how many sound uploads a round needs; under `--secure` nothing can be taken out of a sum, and what is
malformed ends the run. `--max-update-norm` bounds an update. A number above 1.8e19 (float32) is malformed, as it could make a
sum overflow. `--aggregate` chooses a robust rule, in which every client has one vote whatever rows it says it has;
`--byzantine` is the share of liars it expects (0.2). `--attack` lets a share of clients lie, to see what a rule withstands.

A mean by rows goes by what clients say: it warns of one with more than half of all rows or 10 times the median.
`--max-share` caps a client's share of a round's weight, `--max-rows-per-client` leaves out who says that it has more. Over
sites the limit is 10 times the median of three sites or more (10,000,000 for fewer); a site above it, with facts that
cannot be or with the name of another is refused by name, and nobody else. So is a site whose classes, recipes, views or
code are not those of more than half of the sites; where no such half is, nothing begins before `--like NAME` says which
site is right. Who is there and cannot take part is not waited for after `--wait`. A name belongs to the first key that takes part
under it, in later runs of the same server too (`fedcache flower names`); a server without keys binds it for one run, and
says so. Within the limits a claim is not checked: it
can weigh 10 times an honest one in a mean. What sites score themselves is listed as `claimed` in `result.json`,
marked so in `fedcache runs list`, the report and comparisons, and neither ranked nor averaged with what was measured here.

## Sites that lie
Sums over rows bound one another, so some numbers cannot be statistics of any rows. A method declares which statistic
each tensor is (`UploadTensor(..., statistic=Statistic(KIND))`), and fedcache checks each upload by itself
(`federate/trust/statistic_checks.py`):

| statistic | what is checked |
|---|---|
| sum of z z' (of all rows or of each class) | no negative eigenvalue, also after the part that the class sums of the same upload explain is subtracted; trace at least that part |
| sums of squares | not negative; at least the squares of the sums over the number of rows |
| class sums | 0 for a class without rows; with their total |
| ridge solutions (afl) | the ridge is in the matrix; what the solution explains is at most the number of rows |
| Gaussian mixtures (fedpft) | deviations and weights not negative; the weights of a class sum to 1 |
| all of them | no longer than the rows allow, where a bound on rows is known |

The bound on rows is automatic for unit features (`feat_post=l2`, `l2_concat`, `sign`), random Fourier features, and unit
prototypes. `--max-row-norm` sets it for other features. An upload that fails a check is rejected or ends the run, as
`--on-bad-update` says, and the site is named with the reason.

Checks run on every upload over sites, and in one process with `--aggregate`, `--on-bad-update reject`,
`--max-update-norm` or `--max-row-norm`. They do not run under `--secure`, where the server sees sums alone, under
`--dp-noise`, where clipping bounds each upload, and on the uploads of clients that `--attack` lets lie.

Weights, steps and other tensors that are no statistics are compared with the uploads of the other clients in the same
round, if there are three or more. An upload is rejected when one of its tensors holds a number above 65,536 (float32)
and above 1,000 times the median of the other uploads. Where the server puts the mean of uploads in the place of a tensor,
the numbers are differences from what the client was sent. Up to 65,536 the square of a product of a weight and a
feature is a number that may be sent, so honest clients can train from the model. The comparison is left out under
`--on-bad-update fail` with a robust rule, which withstands such an upload.

An upload can pass all checks and still make the server's system singular, or a number of the model 1,000 times larger
than it is without this upload, and above 65,536. fedcache then leaves out one upload after the other (at most 32,
beginning with the one farthest from the median of all). If the server can aggregate without one upload, that upload is
rejected and its site named. If it cannot, a singular system ends the run with exit 7 and the names of the suspects.

If more than half of the sites of a round send unsound uploads, and sent sound ones in the round before, the model is
the cause. The run then ends with exit 7, and no site is blamed.

Accuracy on scikit-learn's digits if one of six sites lies (`python tools/lying_sites.py` prints the tables). A star marks
runs in which the site was rejected and named. Every number that is no count is multiplied by the factor in the head of the column.

`--set feat_post=none`

| method | honest | x -1 | x -1e6 | x 1e6 | second moments x -1 | zeros | x -1e15 |
|---|---|---|---|---|---|---|---|
| fed3r | .927 | .932* | .932* | .932* | .932* | .932 | .932* |
| fedcgs | .938 | .938* | .938* | .938* | .938* | .946 | .938* |
| afl | .927 | .930* | .930* | .930* | .930* | .930* | .930* |
| gda | .772 | .772* | .772* | .772* | .772* | .772 | .772* |
| fedpft | .896 | .901* | .901* | .901* | .901* | .901* | .901* |
| fedcof | .783 | .465 | .000 | .828 | .465 | .839 | .000 |
| gh-ofl | .848 | .851* | .851* | .851* | .851* | .763 | .851* |
| fedncm | .907 | .901 | .000 | .901 | .901 | .899 | .000 |
| fedproto | .927 | .926 | .892* | .892* | .926 | .932 | .892* |
| fedavg | .904 | .932 | .915* | .915* | .932 | .927 | .915* |
| fednova | .972 | .344 | .963* | .963* | .344 | .961 | .963* |
| feddyn | .961 | .490 | .961* | .961* | .490 | .051 | .961* |
| scaffold | .983 | .101 | .977* | .977* | .101 | .983 | .977* |
| fedadam | .614 | .107 | .637* | .637* | .107 | .454 | .637* |

`--set feat_post=l2`, unit features

| method | honest | x -1 | x -1e6 | x 1e6 | second moments x -1 | zeros | x -1e15 |
|---|---|---|---|---|---|---|---|
| fed3r | .930 | .927* | .927* | .927* | .927* | .927 | .927* |
| fedcgs | .932 | .938* | .938* | .938* | .938* | .946 | .938* |
| afl | .938 | .930* | .930* | .930* | .930* | .930* | .930* |
| gda | .789 | .794* | .794* | .794* | .794* | .786 | .794* |
| fedpft | .856 | .859* | .859* | .859* | .859* | .859* | .859* |
| fedcof | .800 | .462 | .786* | .786* | .462 | .837 | .786* |
| gh-ofl | .896 | .887* | .887* | .887* | .887* | .848 | .887* |
| fedncm | .904 | .904 | .901* | .901* | .904 | .901 | .901* |
| fedproto | .918 | .901 | .783* | .783* | .901 | .922 | .783* |
| fedavg | .851 | .732 | .831* | .831* | .732 | .831 | .831* |
| fednova | .961 | .918 | .963* | .963* | .918 | .955 | .963* |
| feddyn | .952 | .834 | .952* | .952* | .834 | .096 | .952* |
| scaffold | .977 | .961 | .969* | .969* | .961 | .972 | .969* |
| fedadam | .969 | .718 | .966* | .966* | .718 | .918 | .966* |

`--set feat_post=none --max-row-norm 80`

| method | honest | x -1 | x -1e6 | x 1e6 | second moments x -1 | zeros | x -1e15 |
|---|---|---|---|---|---|---|---|
| fedcof | .783 | .465 | .786* | .786* | .465 | .839 | .786* |
| fedncm | .907 | .901 | .899* | .899* | .901 | .899 | .899* |

`--set feat_post=none --aggregate trimmed:0.2`

| method | honest | x -1 | x -1e6 | x 1e6 | second moments x -1 | zeros | x -1e15 |
|---|---|---|---|---|---|---|---|
| fed3r | .924 | .924* | .924* | .924* | .924* | .930 | .924* |
| fedcgs | .941 | .941* | .941* | .941* | .941* | .938 | .941* |
| gda | .772 | .772* | .772* | .772* | .772* | .772 | .772* |
| gh-ofl | .842 | .856* | .856* | .856* | .856* | .851 | .856* |
| fedncm | .907 | .904 | .904 | .896 | .904 | .904 | .904 |
| fedproto | .926 | .926 | .925 | .927 | .926 | .926 | .925 |
| fedavg | .910 | .915 | .915* | .915* | .915 | .915 | .915* |
| fednova | .963 | .944 | .963* | .963* | .944 | .952 | .963* |
| scaffold | .986 | .983 | .980* | .980* | .983 | .983 | .980* |

What the checks cannot see: sums with another sign or size are sums of some rows. Without second moments (fedncm,
fedcof) only a bound on rows tells a million times too large a sum from a real one, and no check tells a sign. Weights of
models (fedavg) and prototypes of trained projections (fedproto) are no statistics of the features; `--max-update-norm`
bounds updates, and robust rules withstand a liar. `median` and `trimmed` take each number by itself, and such a matrix of
second moments fits no sums. For methods that send second moments fedcache therefore takes the mean of the uploads
nearest to that median (without it fed3r with `trimmed:0.2` falls from .927 to .589).

## Differential privacy
`--dp-clip C --dp-noise z` clips what each client sends to norm C and adds N(0, (zC)^2) to the sum of every round (extra
`dp`). No other rule of `--aggregate` goes with it, and not the Flower engine. The unit is one client of the partition,
added or removed; the server is trusted; who the clients of the federation are, and how many, is public.

- **Noise** comes from the operating system's randomness (`os.urandom`, by the inverse of the normal distribution
  function; each number is the sum of four draws over 2, so that its low bits do not tell what it was added to, as in
  Opacus). It is not the discrete Gaussian, the sum is one of floating-point numbers, and the time that drawing takes
  is not hidden. Nothing of it is kept: the same command with `--fresh` has another result. A round is kept before it
  is told, so a run that was killed makes no told round twice.
- **A simulation** is asked for with `--dp-seed N`. Its noise can be repeated by anyone who reads the result, so it
  hides nothing; every line with an epsilon, `result.json` (`trust.privacy.simulation`) and the report say so. Its key
  covers all that the run is, so two runs that differ in a client share no noise.
- **Epsilon** is told for `--dp-delta` by privacy loss distributions and by Renyi divergence; above an epsilon of 50 the
  first is not computed (it would take all memory, and promise nothing). It assumes that each client is drawn for a
  round by itself, and that nobody learns who was: the draw is the operating system's too, no record names who took
  part or how many, and traffic is that of the expected number. What epsilon is without that secrecy stands beside it,
  and is the one told where `--dp-allow participants` keeps the names.
- **It composes.** Every seed is a release: a result has the epsilon of one seed and of all together. A grid or
  search reports one epsilon for everything it released: all its points, those that were pruned or failed, all seeds,
  and the model that `--retrain` trains again on training and validation rows. `privacy.jsonl` in `FEDCACHE_HOME` has a sealed line for every seed whose noise was drawn, written
  before it is released, and `fedcache ls --privacy` adds them up for each partition, and for each dataset. Returning a stored result
  spends nothing, `--fresh` spends again, simulations are not in it. A run that goes on from an older state than the one
  it told last draws noise for told rounds again: that is another release, and it says so. One process or
  thread at a time trains a private run: it holds `running.lock` in the run's directory from before it reads a checkpoint
  until its result is stored. Every other start of the same run waits, says so, and then returns the stored result; it
  does not draw noise of its own. The operating system releases the lock of a process that was killed, and one of those
  that wait resumes from the checkpoint. Where files cannot be locked, a private run is refused (exit 6). A copy of a
  whole home from an earlier day knows what was spent until that day, and nothing in it can tell. Runs without noise are not counted and promise
  nothing.
- **Whom epsilon speaks about.** The epsilon of one partition bounds what all its releases tell about one of its clients,
  with all of its rows. The epsilon of a dataset composes every release about it, over all partitions, and over stores
  that have its name or its content. It bounds what they tell about any one row, as each partition gives a row to one
  client. It bounds what they tell about a client only if one client of every partition holds that client's rows. That is
  so for partitions that differ in `--validation` alone, so a grid with `--retrain` tells the epsilon of a client. A grid
  that sweeps the partition, or draws one for each seed, tells the epsilon of a row. A client whose rows other partitions
  spread over several clients has no bound over all of them.

What epsilon does not cover is refused, or must be allowed by name:

| what leaves a client, or is told of it | with `--dp-noise` |
|---|---|
| floating-point tensors of its upload (`fedcache methods info NAME`) | covered |
| number of its rows | not used: every client weighs the same |
| rows of all clients together, by which sums are scaled (fed3r) | `--dp-allow rows` |
| mean and deviation of every feature over all clients' rows (`feat_post=standardize`), or the mean length of all rows (`rff_sigma=auto`); a saved model holds them | `--dp-allow statistics` |
| clients' own models, which have no noise and tell who was never drawn | not saved |
| rows, features and images in a report | not drawn, refused |
| rows of each class | refused; of fedproto which classes it has is sent, and covered |
| who took part in which round | not told, or `--dp-allow participants` |
| accuracy, F1, confusion, diagnostics, classes owned: what is measured on clients' rows | `--dp-allow evaluation` |
| uploads that are refused, by client and round (`--on-bad-update reject`) | `--dp-allow participants` |
| whose update is long, or who has many rows (`--max-update-norm`, `--max-rows-per-client`) | refused |
| that a client has rows at all, its name, that its malformed upload ended the run | public |
| time of each round | not told; that of the whole run is. `--track` gets all rounds when the run has ended, or each at once with `--dp-allow participants` |
"""


def main() -> int:
    """Run, write, and tell whether anything was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--mutate", action="store_true")
    parser.add_argument(
        "--only", default="", metavar="ID,ID", help="these rows; the others stay as they are"
    )
    asked = parser.parse_args()
    rows: dict[str, dict[str, object]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    bad = 0
    if strange := set(filter(None, asked.only.split(","))) - {p.id for p in PROMISES}:
        parser.error(
            f"there is no row {', '.join(sorted(strange))}; rows: {', '.join(p.id for p in PROMISES)}"
        )
    for promise in PROMISES:
        if asked.only and promise.id not in asked.only.split(","):
            continue
        begun = time.monotonic()
        passed, cases, failed, said = run(promise.tests, ROOT, asked.full)
        broken = (
            mutate(promise)
            if asked.mutate and not failed
            else str(rows.get(promise.id, {}).get("broken", ""))
        )
        before = rows.get(promise.id, {})
        if (
            not asked.full
            and not failed
            and isinstance(before.get("cases"), int)
            and before["cases"] > cases
        ):
            cases = int(str(before["cases"]))  # more were tried before
        rows[promise.id] = {
            "tests": passed,
            "cases": cases,
            "lost": failed,
            "broken": broken or "-",
        }
        bad += bool(failed) or broken == "NOT NOTICED"
        print(
            f"{promise.id:3} {passed:5} tests {cases:6} cases {failed:3} lost  {broken:14} "
            f"{time.monotonic() - begun:6.1f} s  {said}",
            flush=True,
        )
        KEPT.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(rows, "Counts are the largest that ran."), encoding="utf-8")
    if bad:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
