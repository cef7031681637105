"""A hundred mistakes on the command line, and the first line of the answer to each."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from harness.cli.main import main
from tests.support import arena

FILES = {
    "tiny.toml": arena.TIMING,
    "empty.toml": "",
    "notes.txt": "my notes",
    "beginner.py": "def patient(job, *, clocks: int = 30):\n    yield\n\n\nnumber = 7\n",
    "needy.py": "def needy(job, gain):\n    yield\n",
    "broken.py": "import nowhere_at_all\n",
    "wrong.py": "def f(:\n",
    "program.py": "import sys\n\nsys.exit(3)\n",
    "twice.toml": arena.TIMING.replace("[target]", "[target]\nvalue = 3"),
    "huge.toml": arena.TIMING.replace("value = 60", "value = 1e40"),
    "wide.toml": arena.TIMING.replace("[2, 4]", "[2, 4.5]"),
    "roles.toml": arena.TIMING.replace("[target]", '"role/n0" = { choice = ["worker", "boss"] }\n[target]'),
    "tables.toml": arena.TIMING.replace("[target]", "replicas = { integer = [1, 3] }\n[target]"),
}

MISTAKES = [
    ("compre", "harness: error: there is no 'compre': did you mean compare?"),
    ("comapre digits", "harness: error: there is no 'comapre': did you mean compare?"),
    ("shwo cruise", "harness: error: there is no 'shwo': did you mean show?"),
    ("lsit tuners", "harness: error: there is no 'lsit': did you mean list?"),
    ("paly digits cruise", "harness: error: there is no 'paly': did you mean play or deploy?"),
    ("compare --sedes 3", "harness compare: error: there is no --sedes: did you mean --seeds or --address?"),
    ("compare --tuners fixed --sseds 3", "harness compare: error: there is no --sseds: did you mean --seeds?"),
    ("compare --seeds many", "harness compare: error: cannot use --seeds 'many': give a whole number"),
    ("compare --seeds 0", "harness: Cannot compare on 0 seeds: give at least 1."),
    ("compare --seed 3", "harness compare: error: there is no --seed: did you mean --seeds?"),
    ("compare tiny.toml --tuners fixde --out folder", "harness: No tuner 'fixde'. Did you mean 'fixed'? ..."),
    ("report folder --csv=table.csv", "harness report: error: cannot use --csv=table.csv: --csv takes no value"),
    ("new tuner conftest", "harness: Cannot name a tuner 'conftest': pytest takes conftest.py for its own. Choose ..."),
    ("new tuner test_rates", "harness: Cannot name a tuner 'test_rates': pytest takes test_rates.py for a file of ..."),
    ("draw drawn:placement[3] --out d", "harness: Cannot draw 'drawn:placement[3]': name the family alone, and its ..."),
    ("compare no*.toml", "harness: No file matches 'no*.toml': a pattern is relative to the working folder, ..."),
    ("compare --seeds -3", "harness: Cannot compare on -3 seeds: give at least 1."),
    ("compare --seeds 2.5", "harness compare: error: cannot use --seeds '2.5': give a whole number"),
    ("compare --jobs 0", "harness: Cannot use 0 jobs: give at least 1."),
    ("compare --jobs -1", "harness: Cannot use -1 jobs: give at least 1."),
    ("compare --jobs two", "harness compare: error: cannot use --jobs 'two': give a whole number"),
    ("compare --jobs 2 --address auto", "harness compare: error: argument --address: not allowed with argument --jobs"),
    ("compare --out", "harness compare: error: argument --out: expected one argument"),
    ("play tiny.toml nothing", "harness: No tuner 'nothing'. `harness list tuners` has all. One of your own is ..."),
    ("show nothing", "harness: No scenario or tuner 'nothing': choose one of the ..."),
    ("trace check results", "harness: Cannot read a trace from results: it has the results of a comparison. With ..."),
    ("reproduce cruise --seeds 0", "harness reproduce: error: cannot use --seeds '0': give a whole number, 1 or more"),
    ("trace replayed tiny.toml --tuners fixt --out w", "harness: Cannot compare tiny with a recording: it has no ..."),
    (
        "play tiny.toml best_fixed",
        "harness: Cannot play 'best_fixed' alone: it is the best of many runs, in hindsight. Compare it with others.",
    ),
    (
        "compare digit",
        "harness: No scenario 'digit': did you mean digits or rlp-digits or digits-svm? A file of your own is ...",
    ),
    (
        "compare Digits",
        "harness: No scenario 'Digits': did you mean digits or rlp-digits or digits-svm? A file of your own is ...",
    ),
    (
        "compare digits.tml",
        "harness: No scenario 'digits.tml': did you mean digits or digits-svm or rlp-digits? A file of your own ...",
    ),
    (
        "compare digits-lgistic",
        "harness: No scenario 'digits-lgistic': did you mean digits-logistic or digits-svm or digits? A file of ...",
    ),
    ("compare digits,boat-*", "harness: No scenario 'digits,boat-*': separate scenarios by spaces: digits boat-*."),
    (
        "compare nothing-*",
        "harness: No scenario matches 'nothing-*': `harness list scenarios` shows all.",
    ),
    ("compare my.toml", "harness: Cannot read scenario my.toml: No such file or directory."),
    (
        "compare folder",
        "harness: No scenario 'folder': choose one of the ...",
    ),
    ("compare folder.toml", "harness: Cannot read scenario folder.toml: No such file or directory."),
    (
        "compare notes.txt",
        "harness: No scenario 'notes.txt': choose one of the ...",
    ),
    ("compare empty.toml", "harness: empty.toml: summary: it is missing; every scenario says this."),
    (
        "compare digits digits",
        "harness: Cannot compare scenario 'digits' with itself: name each once, and files by different names.",
    ),
    (
        "compare tiny.toml digits-logistic tiny.toml",
        "harness: Cannot compare scenario 'tiny' with itself: name each once, and files by different names.",
    ),
    ("compare digits[seconds=10", "harness: Cannot read 'digits[seconds=10': write digits[key=value,...]."),
    (
        "compare digits[secnds=10]",
        "harness: digits.toml: cannot change 'secnds=10': no line begins with 'secnds'; did you mean seconds? To add "
        "a line, edit a copy of the file.",
    ),
    (
        "compare digits[start.secnds=10]",
        "harness: digits.toml: cannot change 'start.secnds=10': no line in [start] begins with 'secnds'; choose one of "
        "worker_count, policy, batch_size, learning_rate, momentum, intra_threads. To add a line, edit a copy of the file.",
    ),
    (
        "compare digits[strat.policy=asp]",
        "harness: digits.toml: cannot change 'strat.policy=asp': it has no table [strat]; did you mean start?",
    ),
    ("compare digits[seconds=]", "harness: digits.toml: cannot change 'seconds=': write key=value."),
    ("compare digits[seconds=-5]", "harness: digits.toml: [budget] seconds: expected `float` > 0.0, not -5."),
    (
        "compare digits[policy=nothing]",
        "harness: digits.toml: cannot change 'policy=nothing': 2 lines begin with 'policy'; write start.policy=... or "
        "free.policy=..., or edit a copy of the file.",
    ),
    (
        "compare digits[value=1.5]",
        "harness: digits.toml: [target] value: accuracy 1.5 cannot be reached; it lies in (0, 1].",
    ),
    ("compare digits[count=0]", "harness: digits.toml: [seeds] count: expected `int` >= 1, not 0."),
    (
        "compare digits[name=cifar99]",
        "harness: digits.toml: [workload] name: no workload 'cifar99'; choose one of the ...",
    ),
    ("compare tiny.toml --tuners fixt", "harness: No tuner 'fixt'. Did you mean 'fixed'? `harness list tuners` has all."),
    ("compare tiny.toml --tuners Fixed", "harness: No tuner 'Fixed'. Did you mean 'fixed'? `harness list tuners` has all."),
    (
        "compare tiny.toml --tuners cruize,fixed",
        "harness: No tuner 'cruize'. Did you mean 'cruise'? `harness list tuners` has all.",
    ),
    (
        'compare tiny.toml --tuners ""',
        "harness: No tuner ''. `harness list tuners` has all. One of your own is package.module:factory.",
    ),
    (
        "compare tiny.toml --tuners fixed,,asp",
        "harness: No tuner ''. `harness list tuners` has all. One of your own is package.module:factory.",
    ),
    (
        "compare tiny.toml --tuners fixed,fixed",
        "harness: Cannot compare tuner 'fixed' with itself: name each once, and files by different names.",
    ),
    (
        "compare tiny.toml --tuners all,fixed",
        "harness: Cannot compare tuner 'fixed' with itself: name each once, and files by different names.",
    ),
    (
        'compare tiny.toml --tuners "fixed asp"',
        "harness: No tuner 'fixed asp'. Did you mean 'fixed'? `harness list tuners` has all.",
    ),
    (
        "compare tiny.toml --tuners beginner.patient",
        "harness: No tuner 'beginner.patient'. Did you mean 'beginner:patient'? `harness list tuners` has all.",
    ),
    (
        "compare tiny.toml --tuners beginner.py",
        "harness: No tuner 'beginner.py'. Did you mean 'beginner:FUNCTION'? `harness list tuners` has all.",
    ),
    (
        "compare tiny.toml --tuners beginner.py:patient",
        "harness: Cannot find tuner 'beginner.py:patient': write beginner:patient, with the module's name.",
    ),
    (
        "compare tiny.toml --tuners beginner/patient",
        "harness: No tuner 'beginner/patient'. Did you mean 'beginner:patient'? `harness list tuners` has all.",
    ),
    (
        "compare tiny.toml --tuners fixed,dssp[low=5,high=3]",
        "harness: Tuner 'dssp[low=5,high=3]': Cannot bound staleness by [5, 3]: give 0 <= low <= high.",
    ),
    (
        "compare tiny.toml --tuners cruise[solver=milp,overlap=true]",
        "harness: Tuner 'cruise[solver=milp,overlap=true]': Cannot use solver='milp' with overlap=True: ...",
    ),
    ("play tiny.toml mltuner[windows=5]", "harness: Tuner 'mltuner[windows=5]': Cannot tune with windows=5: only ..."),
    ("play tiny.toml bespoke_bo[iterations=8]", "harness: Tuner 'bespoke_bo[iterations=8]': Cannot count 10 of 8 ..."),
    ("play tiny.toml rlp[policy=none.npz]", "harness: Tuner 'rlp[policy=none.npz]': Cannot load a policy from ..."),
    ("compare tiny.toml --tuners beginner:", "harness: Cannot find tuner 'beginner:': write package.module:factory."),
    ("compare tiny.toml --tuners :patient", "harness: Cannot find tuner ':patient': write package.module:factory."),
    (
        "compare tiny.toml --tuners beginner:pateint",
        "harness: Cannot find tuner 'beginner:pateint': beginner has no 'pateint'. Did you mean 'patient'?",
    ),
    (
        "compare tiny.toml --tuners beginner:number",
        "harness: Cannot use 'beginner:number' as a tuner: it is no function; write a function of a Job that yields "
        "actions.",
    ),
    (
        "compare tiny.toml --tuners needy:needy",
        "harness: Cannot use 'needy:needy' as a tuner (missing a required argument: 'gain'): it is called with a ...",
    ),
    (
        "play tiny.toml needy",
        "harness: No tuner 'needy'. Did you mean 'needy:FUNCTION'? `harness list tuners` has all.",
    ),
    (
        "compare tiny.toml --tuners broken:tuner",
        "harness: Cannot import tuner 'broken:tuner' (ModuleNotFoundError: No module named 'nowhere_at_all'): is its ...",
    ),
    (
        "compare tiny.toml --tuners wrong:f",
        "harness: Cannot import tuner 'wrong:f' (SyntaxError: invalid syntax (wrong.py, line 1)): is its module ...",
    ),
    (
        "compare tiny.toml --tuners nowhere:tuner",
        "harness: Cannot import tuner 'nowhere:tuner' (ModuleNotFoundError: No module named 'nowhere'): is its module ...",
    ),
    (
        "compare tiny.toml --tuners cruise[gain=abc]",
        "harness: Cannot use gain=abc for tuner 'cruise[gain=abc]': give a number, at least 0 (default: 0.05).",
    ),
    (
        "compare tiny.toml --tuners cruise[gain=-1]",
        "harness: Cannot use gain=-1 for tuner 'cruise[gain=-1]': give a number, at least 0 (default: 0.05).",
    ),
    (
        "compare tiny.toml --tuners cruise[gian=0.1]",
        "harness: Tuner 'cruise[gian=0.1]' has no option 'gian'. Did you mean 'gain'? It has gain, extra_gain, ...",
    ),
    (
        "compare tiny.toml --tuners cruise[gain]",
        "harness: Cannot read option 'gain' of tuner 'cruise[gain]': write option=value.",
    ),
    (
        "compare tiny.toml --tuners cruise[gain=0.1",
        "harness: Cannot read the options of tuner 'cruise[gain=0.1': write cruise[option=value,...].",
    ),
    ("compare tiny.toml --tuners cruise[]", "harness: Cannot read option '' of tuner 'cruise[]': write option=value."),
    (
        "compare tiny.toml --tuners cruise[solver=milpp]",
        "harness: Cannot use solver=milpp for tuner 'cruise[solver=milpp]': give exact or milp (default: exact).",
    ),
    (
        "compare tiny.toml --tuners cruise[overlap=yes]",
        "harness: Cannot use overlap=yes for tuner 'cruise[overlap=yes]': give true or false (default: not set).",
    ),
    (
        "compare tiny.toml --tuners cruise[batches=2.5]",
        "harness: Cannot use batches=2.5 for tuner 'cruise[batches=2.5]': give a whole number, at least 1 (default: 10).",
    ),
    (
        "compare tiny.toml --tuners ssp[staleness=-1]",
        "harness: Cannot use staleness=-1 for tuner 'ssp[staleness=-1]': give a whole number, at least 0 (default: 3).",
    ),
    (
        "compare tiny.toml --tuners k_sync[share=2]",
        "harness: Cannot use share=2 for tuner 'k_sync[share=2]': give a number, above 0, at most 1 (default: 0.7).",
    ),
    ("compare tiny.toml --tuners fixed[x=1]", "harness: Tuner 'fixed[x=1]' has no option 'x'. It has none."),
    (
        "compare tiny.toml --tuners tpe[trials=0]",
        "harness: Cannot use trials=0 for tuner 'tpe[trials=0]': give a whole number, at least 1 (default: 12).",
    ),
    (
        "compare tiny.toml --tuners mltuner[search=bayes]",
        "harness: Cannot use search=bayes for tuner 'mltuner[search=bayes]': give tpe or gp or random or grid ...",
    ),
    (
        "compare tiny.toml --tuners bo_online[surrogate=rbf]",
        "harness: Cannot use surrogate=rbf for tuner 'bo_online[surrogate=rbf]': give ours or paper or code ...",
    ),
    (
        "compare tiny.toml --tuners beginner:patient[clocks=few]",
        "harness: Cannot use clocks=few for tuner 'beginner:patient[clocks=few]': give a whole number (default: 30).",
    ),
    (
        "compare tiny.toml --tuners beginner:patient[clock=3]",
        "harness: Tuner 'beginner:patient[clock=3]' has no option 'clock'. Did you mean 'clocks'? It has clocks.",
    ),
    (
        "compare tiny.toml --out tiny.toml",
        "harness: Cannot write results to tiny.toml: it is a file. Name a folder with --out.",
    ),
    (
        "compare tiny.toml --out tiny.toml/out",
        "harness: Cannot write results to tiny.toml/out: Not a directory. Name another folder with --out.",
    ),
    ("compare tiny.toml --out ''", "harness compare: error: cannot use --out '': give the name of a file or folder"),
    ("compare tiny.toml --seeds 10000000000", "harness: Cannot compare on 10000000000 seeds: give at most 100000."),
    (
        "compare tiny.toml --tuners program:tuner",
        "harness: Cannot import tuner 'program:tuner' (SystemExit: 3): is its module free of errors, and installed or ...",
    ),
    (
        "compare twice.toml",
        "harness: twice.toml: it is no TOML: a key is there twice (at line 18, column 11). The line is: value = 60",
    ),
    ("compare huge.toml", "harness: huge.toml: [target] value: 1e+40 is too large; give at most 1e+30."),
    ("compare wide.toml", "harness: wide.toml: [free] batch_size: cannot be 4.5; give a whole number."),
    (
        "compare roles.toml",
        "harness: roles.toml: [free] role/n0: cannot be 'boss'; choose among worker, server, both, idle.",
    ),
    (
        "play tables.toml fixed",
        "harness: tables.toml: [free] Knob 'replicas' sets nothing: this job has no blocks of embedding tables.",
    ),
    ("list tunes", "harness list: error: there is no 'tunes': did you mean tuners?"),
    (
        "show drawn:mixed[4:7]",
        "harness: Cannot load 'drawn:mixed[4:7]': it means 3 scenarios; name one, as in 'drawn:mixed[4]'.",
    ),
    ("list tuners now", "harness list: error: cannot use 'now' here: it is one word too many"),
    ("show", "harness show: error: missing: NAME (scenario, TOML file, one member as 'drawn:learning[3]', or tuner ..."),
    (
        "show digitz",
        "harness: No scenario or tuner 'digitz': did you mean digits or rlp-digits or digits-svm? A file of your own ...",
    ),
    (
        "show cruize",
        "harness: No scenario or tuner 'cruize': did you mean cruise? A file of your own is named with its .toml, a ...",
    ),
    (
        "show cruise[gain=abc]",
        "harness: Cannot use gain=abc for tuner 'cruise[gain=abc]': give a number, at least 0 (default: 0.05).",
    ),
    (
        "show beginner:pateint",
        "harness: Cannot find tuner 'beginner:pateint': beginner has no 'pateint'. Did you mean 'patient'?",
    ),
    ("show nowhere.toml", "harness: Cannot read scenario nowhere.toml: No such file or directory."),
    ("show empty.toml", "harness: empty.toml: summary: it is missing; every scenario says this."),
    (
        "show digits[policy=nothing]",
        "harness: digits.toml: cannot change 'policy=nothing': 2 lines begin with 'policy'; write start.policy=... or "
        "free.policy=..., or edit a copy of the file.",
    ),
    (
        "report nowhere",
        "harness: Cannot read results from nowhere: it has no manifest.json. Name a folder that compare wrote.",
    ),
    (
        "report folder",
        "harness: Cannot read results from folder: it has no manifest.json. Name a folder that compare wrote.",
    ),
    ("report", "harness report: error: missing: DIR (results folder)"),
    ("play digits", "harness play: error: missing: TUNER (name, or package.module:factory)"),
    (
        "play digitz fixed",
        "harness: No scenario 'digitz': did you mean digits or rlp-digits or digits-svm? A file of your own is ...",
    ),
    ("play tiny.toml fixt", "harness: No tuner 'fixt'. Did you mean 'fixed'? `harness list tuners` has all."),
    ("play tiny.toml fixed --seed one", "harness play: error: cannot use --seed 'one': give a whole number, 0 or more"),
    ("play tiny.toml fixed --seed -1", "harness play: error: cannot use --seed '-1': give a whole number, 0 or more"),
    ("play tiny.toml fixed --sede 1", "harness play: error: there is no --sede: did you mean --seed?"),
    ("new tuner", "harness new: error: missing: NAME (of the tuner: a word in small letters, as in my_tuner)"),
    ("new scenario mine", "harness new: error: there is no 'scenario': choose one of tuner."),
    (
        "new tuner My-Tuner",
        "harness: Cannot name a tuner 'My-Tuner': write a word in small letters, digits and _, as in my_tuner.",
    ),
    (
        "new tuner class",
        "harness: Cannot name a tuner 'class': write a word in small letters, digits and _, as in my_tuner.",
    ),
    (
        "new tuner cruise",
        "harness: Cannot name a tuner 'cruise': there is one of that name. `harness show cruise` explains it.",
    ),
    ("new tuner random", "harness: Cannot name a tuner 'random': Python has a module of that name. Choose another name."),
    ("new tuner mine --out folder", "harness: Cannot write folder: it exists already. Name another folder with --out."),
    ("train cruise --out x.npz", "harness: Cannot train 'cruise': rlp is the only tuner that is trained."),
    (
        "train rlp --out x.npz --accuracy 0",
        "harness train: error: cannot use --accuracy '0': give a finite number, above 0, at most 1",
    ),
    (
        "train rlp --out notes.txt/x.npz",
        "harness train: error: cannot use --out 'notes.txt/x.npz': give another name; nothing can be written there ...",
    ),
    ("train rlp", "harness train: error: missing: --out (npz file to write the policy to)"),
    ("train rlp[gama=1] --out x.npz", "harness: Training RLP has no option 'gama': did you mean gamma?"),
    ("train rlp --out x.npz --rates a,b", "harness: Cannot read --rates 'a,b': write numbers with commas between them."),
    ("train rlp --out x.npz --instances 0", "harness: Cannot train with instances 0: give at least 1."),
    (
        "deploy --live live-digitz",
        "harness: No scenario 'live-digitz': did you mean live-digits or rlp-digits or mltuner-digits? A file ...",
    ),
    (
        "deploy --live tiny.toml",
        "harness: Cannot deploy tiny: its workload 'cruise-nmf' is timing-only and learns nothing. Give it a model and "
        "data, as `harness show live-digits` has.",
    ),
    (
        "deploy --live live-digits --tuner fixt --dry-run",
        "harness: No tuner 'fixt'. Did you mean 'fixed'? `harness list tuners` has all.",
    ),
    (
        "deploy --live live-digits --from nowhere",
        "harness: Cannot read results from nowhere: it has no manifest.json. Name a folder that compare wrote.",
    ),
    (
        "deploy --live live-digits --tuner asp --from folder",
        "harness deploy: error: argument --from: not allowed with argument --tuner",
    ),
    (
        "deploy --live live-digits --seeds 3",
        "harness: Cannot use --seeds for one job: name the tuners of a contest with --tuners, or give --seed.",
    ),
    (
        "deploy --live live-digits --tuners fixed,asp --seed 3",
        "harness: Cannot use --seed for a contest, which plays seeds 0, 1, ...: say how many with --seeds.",
    ),
    (
        "deploy live-digits --tuners fixed --seeds 0",
        "harness deploy: error: cannot use --seeds '0': give a whole number, 1 or more",
    ),
    (
        "deploy live-digits --tuners fixed,fixed",
        "harness: Cannot compare tuner 'fixed' with itself: name each once, and files by different names.",
    ),
    (
        "reproduce cruise --out notes.txt",
        "harness reproduce: error: cannot use --out 'notes.txt': give the name of a folder; this is a file",
    ),
    (
        "new tuner mine --out notes.txt/x",
        "harness new: error: cannot use --out 'notes.txt/x': give another name; ...",
    ),
    ("draw learnin --out x", "harness: No family 'learnin': did you mean learning?"),
    ("draw learning --count 0 --out x", "harness draw: error: cannot use --count '0': give a whole number, 1 or more"),
    ("draw learning --first -1 --out x", "harness draw: error: cannot use --first '-1': give a whole number, 0 or more"),
    ("trace", "harness trace: error: missing: COMMAND"),
    ("trace shwo folder", "harness trace: error: there is no 'shwo': did you mean show?"),
    (
        "trace show nowhere",
        "harness: Cannot read a trace from nowhere: it has no trace.json and no tables. Name a trace's folder.",
    ),
    (
        "trace show shipped:homogenous",
        "harness trace show: error: argument TRACE: No recording 'homogenous' comes with the harness: did you mean ...",
    ),
    (
        "trace check folder",
        "harness: Cannot read a trace from folder: it has no trace.json and no tables. Name a trace's folder.",
    ),
    (
        "trace import nothing x --out y",
        "harness: No importer is called 'nothing': there are alibaba-pai-minibatch, azure-vm-noise, bamboo-spot, ...",
    ),
    ("trace convert notes.txt --out x", "harness: Cannot read notes.txt: it is no exchange log of this version of the ..."),
    (
        "trace record tiny.toml --out notes.txt/x",
        "harness trace record: error: cannot use --out 'notes.txt/x': give another name; nothing can be written there ...",
    ),
    ("calibrate nowhere --out folder", "harness calibrate: error: cannot use --out 'folder': give the name of a file; ..."),
    (
        "calibrate shipped:homogeneous --out tiny.toml",
        "harness: Cannot write tiny.toml: it is there already; remove it, or name another file.",
    ),
    (
        "calibrate nowhere --out x.toml --nic nan",
        "harness calibrate: error: cannot use --nic 'nan': give a finite number, above 0",
    ),
    (
        "calibrate nowhere --out x.toml --cores 0",
        "harness calibrate: error: cannot use --cores '0': give a whole number, 1 or more",
    ),
    (
        "calibrate nowhere --out x.toml --jitter -1",
        "harness calibrate: error: cannot use --jitter '-1': give a finite number, 0 or more",
    ),
    (
        "fidelity shipped:six-equal --out x --findings nowhere.txt",
        "harness: Cannot read --findings nowhere.txt: No such file or directory.",
    ),
    ("calibrate --out x.toml", "harness: Cannot calibrate: name a trace's folder, or a recording with --from SOURCE PATH."),
    (
        "calibrate nowhere --out x.toml",
        "harness: Cannot read a trace from nowhere: it has no trace.json and no tables. Name a trace's folder.",
    ),
    (
        "calibrate --from nothing x --out x.toml",
        "harness: No importer is called 'nothing': there are alibaba-pai-minibatch, azure-vm-noise, bamboo-spot, ...",
    ),
    ("fidelity --out x", "harness: Cannot check: name traces, or recordings with --from SOURCE PATH."),
    (
        "fidelity nowhere --out x",
        "harness: Cannot read a trace from nowhere: it has no trace.json and no tables. Name a trace's folder.",
    ),
]
"""The words after `harness`, and the line that answers them; "..." at its end stands for more."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a scenario, tuners and files that are neither."""
    folder = tmp_path_factory.mktemp("desk")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "folder").mkdir()
    (folder / "results" / "runs").mkdir(parents=True)
    (folder / "results" / "manifest.json").write_text("{}")
    return folder


def test_there_are_a_hundred() -> None:
    assert len({command for command, _ in MISTAKES}) == len(MISTAKES) >= 100


@pytest.mark.parametrize(("command", "answer"), MISTAKES)
def test_a_mistake_is_answered_in_one_line_and_nothing_is_run(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, answer: str
) -> None:
    monkeypatch.chdir(desk)
    before = sorted(p.name for p in desk.iterdir() if p.name != "__pycache__")
    try:
        status = main(shlex.split(command))
    except SystemExit as ended:  # argparse, which prints its usage first
        status = int(ended.code or 0)
    said = capsys.readouterr().err
    (line,) = (line for line in said.splitlines() if line.startswith("harness"))
    scenarios = str(Path(__file__).parents[3] / "harness" / "scenarios")
    line = line.replace(f"{scenarios}/", "")
    assert status == 2, said
    if answer.endswith(" ..."):
        assert line.startswith(answer.removesuffix(" ..."))
    else:
        assert line == answer
    assert "Traceback" not in said
    assert sorted(p.name for p in desk.iterdir() if p.name != "__pycache__") == before


def test_a_folder_that_has_been_deleted_is_no_place_to_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert main(["list", "tuners"]) == 2
    assert capsys.readouterr().err == "harness: Cannot run here: this folder has been deleted. Change to another one.\n"
